"""Rounding at load, in slices as in one piece, and what it weighs."""

import pytest
import torch

from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.errors import ConfigError
from kimi_backend.layers import load_quantization
from kimi_backend.layers.load_quantization import quantize, quantizing_kernels
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.linear.kernel import pack_linear
from kimi_kernels.quantization.plain import dequantize, quantize_fp8, quantize_int4
from kimi_kernels.weights import Weight

QUANTIZED = (LinearFormat.FP8, LinearFormat.INT4)


def weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("linear_format", QUANTIZED)
def test_slices_round_as_the_whole(linear_format: LinearFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = weight(300, 160)
    whole = dequantize(quantize(matrix, linear_format))
    monkeypatch.setattr(load_quantization, "_ROWS_AT_ONCE", 128)
    assert torch.equal(dequantize(quantize(matrix, linear_format)), whole)


def test_fp8_is_the_nearest_value() -> None:
    matrix = weight(300, 160)
    assert torch.equal(dequantize(quantize(matrix, LinearFormat.FP8)), dequantize(quantize_fp8(matrix)))


def test_int4_is_closer_than_by_the_largest_magnitude() -> None:
    matrix = weight(256, 512)
    matrix[3, 32:64], matrix[5, 64] = 0, 40.0

    def error(rounded: Weight) -> torch.Tensor:
        return (dequantize(rounded) - matrix).square().sum()

    assert error(quantize(matrix, LinearFormat.INT4)) < 0.8 * error(quantize_int4(matrix))
    assert not dequantize(quantize(matrix, LinearFormat.INT4))[3, 32:64].any()


@pytest.mark.parametrize("linear_format", QUANTIZED)
def test_kernels_multiply_with_the_rounded_weight(linear_format: LinearFormat) -> None:
    reference, matrix, x = KernelSet.plain(), weight(64, 96), weight(5, 96)
    kernels = quantizing_kernels(reference, linear_format)
    product = kernels.linear(x, kernels.pack_linear(matrix))
    rounded = reference.linear(x, reference.pack_linear(dequantize(quantize(matrix, linear_format))))
    assert torch.equal(product, rounded)
    assert not torch.equal(product, reference.linear(x, reference.pack_linear(matrix)))


def test_none_changes_nothing() -> None:
    reference = KernelSet.plain()
    assert quantizing_kernels(reference, LinearFormat.NONE) is reference


@pytest.mark.parametrize("linear_format", QUANTIZED)
@pytest.mark.parametrize("shape", [(128, 128), (300, 160), (2112, 384)])
def test_bytes_are_those_of_the_kernels(linear_format: LinearFormat, shape: tuple[int, int]) -> None:
    tiles, scales, _ = pack_linear(quantize(weight(*shape), linear_format)).tensors
    assert tiles.nbytes + scales.nbytes == linear_format.num_bytes(*shape, item_bytes=2)


def test_a_width_that_int4_cannot_group_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft_quantization: int4 given, .* one is 72 wide; fp8 is allowed"):
        quantize(weight(8, 72), LinearFormat.INT4)
