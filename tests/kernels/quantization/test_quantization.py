"""The weight formats against their words (`naive`), both ways."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kimi_kernels.quantization import naive
from kimi_kernels.quantization.mxfp4 import E2M1_VALUES, quantize_mxfp4
from kimi_kernels.quantization.plain import dequantize, pack_nibbles, quantize_fp8, quantize_int4, unpack_nibbles
from kimi_kernels.weights import Fp8Weight, Int4Weight, Mxfp4Weight, Weight

FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
QUANTIZERS: dict[str, Callable[[Tensor], Weight]] = {
    "int4": quantize_int4,
    "int4 group 8": lambda weight: quantize_int4(weight, 8),
    "int4 group 64": lambda weight: quantize_int4(weight, 64),
    "mxfp4": quantize_mxfp4,
    "fp8": quantize_fp8,
    "fp8 block 24": lambda weight: quantize_fp8(weight, 24),
}
CODES = {
    "int4": torch.arange(-8.0, 8.0),
    "mxfp4": torch.tensor([sign * value for value in E2M1_VALUES for sign in (1, -1)]),
    "fp8": FLOAT8[FLOAT8.isfinite()],
}
LARGEST = {"int4": (7.45, 7.55), "mxfp4": (4, 8), "fp8": (447.9, 448.1)}
"""Steps of a group's largest magnitude, at least and at most: int4's scale is rounded to bf16."""


def int4(rows: int, columns: int, group_size: int, dtype: torch.dtype = torch.bfloat16) -> Int4Weight:
    packed = torch.randint(-(2**31), 2**31, (rows, columns // 8)).to(torch.int32)
    scales = (torch.rand(rows, columns // group_size) + 0.01).to(dtype)
    return Int4Weight(packed=packed, scales=scales, group_size=group_size)


def fp8(block_size: int, *shape: int) -> Fp8Weight:
    *leading, rows, columns = shape
    scales = torch.rand(*leading, -(-rows // block_size), -(-columns // block_size)) + 0.01
    return Fp8Weight(values=(torch.randn(shape) * 100).to(torch.float8_e4m3fn), scales=scales, block_size=block_size)


def every_mxfp4() -> Mxfp4Weight:
    """Every code with every scale; the last is no number."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    return Mxfp4Weight(codes=bytes_.expand(256, 256).contiguous(), scales=bytes_[:, None].expand(256, 16).contiguous())


@pytest.mark.parametrize(
    "weight",
    [
        *(int4(*shape) for shape in ((1, 32, 32), (63, 160, 32), (5, 128, 64), (4, 24, 24), (3, 40, 8))),
        int4(63, 160, 32, torch.float32),
        quantize_int4(torch.randn(3, 5, 64)),
        *(fp8(*shape) for shape in ((128, 1, 1), (128, 128, 256), (128, 130, 200), (16, 63, 65), (24, 2, 50, 30))),
        every_mxfp4(),
        quantize_mxfp4(torch.randn(3, 5, 64)),
        torch.randn(3, 5),
    ],
    ids=lambda weight: f"{type(weight).__name__} {list(weight.shape)}",
)
def test_dequantised_weights_are_what_the_words_say(weight: Weight) -> None:
    found = dequantize(weight)
    assert found.dtype == torch.float32 and found.shape == weight.shape
    torch.testing.assert_close(found, naive.dequantize(weight).float(), rtol=0, atol=0, equal_nan=True)


def steps(weight: Weight) -> Tensor:
    """The scale of each column: what a code of one stands for."""
    if isinstance(weight, Int4Weight):
        ones: Weight = dataclasses.replace(weight, packed=pack_nibbles(torch.ones(weight.shape, dtype=torch.int8)))
    elif isinstance(weight, Fp8Weight):
        ones = dataclasses.replace(weight, values=torch.ones(weight.shape).to(torch.float8_e4m3fn))
    else:
        assert isinstance(weight, Mxfp4Weight)
        ones = dataclasses.replace(weight, codes=torch.full_like(weight.codes, 0x22))
    return naive.dequantize(ones)


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("shape", [(7, 128), (2, 40, 192)])
def test_codes_are_the_nearest_and_use_their_range(kind: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    weight[..., 0, :] = 0
    quantised = QUANTIZERS[kind](weight)
    scaled, found = weight.double() / steps(quantised), naive.dequantize(quantised) / steps(quantised)
    name = kind.split()[0]
    nearest = (scaled.unsqueeze(-1) - CODES[name]).abs().amin(dim=-1)
    assert ((scaled - found).abs() <= nearest + 1e-4).all()
    least, most = LARGEST[name]
    assert least <= scaled.abs().max() <= most
    assert torch.equal(dequantize(quantised)[..., 0, :], weight[..., 0, :])


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "fp8 block 24"])
def test_quantising_what_was_dequantised_changes_nothing(kind: str) -> None:
    once = dequantize(QUANTIZERS[kind](torch.randn(200, 160)))
    assert torch.equal(dequantize(QUANTIZERS[kind](once)), once)


def test_nibbles_begin_at_the_least_significant_end() -> None:
    codes = torch.tensor([[-8, -7, -6, 0, 0, 0, 0, 7]], dtype=torch.int8)
    assert pack_nibbles(codes).item() == 0xF8888210 - 2**32
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_ties_of_mxfp4_go_to_the_even_code() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :8] = torch.tensor([0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0, 4.0])
    expected = torch.tensor([0.0, 1.0, -1.0, 2.0, 2.0, -4.0, 4.0, 4.0])
    assert torch.equal(dequantize(quantize_mxfp4(weight))[0, :8], expected)


BYTES = torch.zeros(2, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(2, 8).int(), "^weight: got torch.int32"),
        (Int4Weight(packed=torch.zeros(2, 8).long(), scales=torch.ones(2, 2)), "^packed: got torch.int64"),
        (
            Int4Weight(packed=torch.zeros(2, 8).int(), scales=torch.ones(2, 3)),
            r"^scales: .*\[2, 3\], expected \[2, 2\]",
        ),
        (Int4Weight(packed=torch.zeros(2, 8).int(), scales=torch.ones(2, 2).int()), "^scales: got torch.int32"),
        (
            Int4Weight(packed=torch.zeros(2, 6).int(), scales=torch.ones(2, 2)),
            "^group_size: got 32, expected a divisor of in_features 48",
        ),
        (Fp8Weight(values=torch.zeros(2, 2), scales=torch.ones(1, 1)), "^values: got torch.float32"),
        (Fp8Weight(values=fp8(128, 130, 4).values, scales=torch.ones(1, 1)), r"^scales: .*\[1, 1\], expected \[2, 1\]"),
        (Mxfp4Weight(codes=BYTES.float(), scales=BYTES), "^codes: got torch.float32"),
        (Mxfp4Weight(codes=BYTES, scales=BYTES[:, :1]), r"^scales: got shape \[2, 1\], expected \[2, 2\]"),
        (Mxfp4Weight(codes=BYTES[:, :8], scales=BYTES), "^codes: got 16 columns, expected a multiple of 32"),
    ],
)
def test_a_weight_that_is_none_is_named(weight: Weight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dequantize(weight)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_nibbles(torch.full((1, 8), 8)), "^codes: got values 8 to 8, expected -8 to 7"),
        (lambda: pack_nibbles(torch.zeros(1, 7, dtype=torch.int8)), "^codes: got 7 columns, expected a multiple of 8"),
        (lambda: pack_nibbles(torch.zeros(1, 8)), "^codes: got torch.float32, expected an integer dtype"),
        (lambda: quantize_int4(torch.ones(2, 48)), "^group_size: got 32, expected a divisor of in_features 48"),
        (lambda: quantize_mxfp4(torch.ones(2, 48)), "^weight: got 48 columns, expected a multiple of 32"),
        (lambda: quantize_fp8(torch.ones(2, 2), 0), "^block_size: got 0"),
    ],
)
def test_what_cannot_be_quantised_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
