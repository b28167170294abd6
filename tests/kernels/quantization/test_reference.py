"""The weight formats against plain formulas."""

import pytest
import torch
from torch import Tensor

from kimi_kernels.quantization.reference import (
    dequantize,
    dequantize_fp8,
    dequantize_int4,
    pack_nibbles,
    quantize_fp8,
    quantize_int4,
    unpack_nibbles,
)
from kimi_kernels.weights import Fp8Weight, Int4Weight


def naive_int4(packed: Tensor, scales: Tensor, group_size: int) -> Tensor:
    rows = [
        [
            (((word & 0xFFFFFFFF) >> 4 * j & 0xF) - 8) * scale_row[(8 * w + j) // group_size]
            for w, word in enumerate(words)
            for j in range(8)
        ]
        for words, scale_row in zip(packed.tolist(), scales.float().tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).float()


def test_the_first_column_is_the_least_significant_nibble() -> None:
    codes = torch.tensor([[-8, -7, -6, 0, 0, 0, 0, 7]])
    assert pack_nibbles(codes).item() == 0xF8888210 - 2**32


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "group_size"), [((1, 32), 32), ((63, 160), 32), ((5, 128), 64), ((4, 24), 24), ((3, 40), 8)]
)
def test_int4_dequantises_as_the_formula_does(
    shape: tuple[int, int], group_size: int, scale_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    packed = torch.randint(-(2**31), 2**31, (shape[0], shape[1] // 8)).to(torch.int32)
    scales = (torch.rand(shape[0], shape[1] // group_size) + 0.01).to(scale_dtype)
    got = dequantize_int4(Int4Weight(packed=packed, scales=scales, group_size=group_size))
    assert got.dtype == torch.float32
    assert torch.equal(got, naive_int4(packed, scales, group_size))


def test_stacked_int4_experts_dequantise_one_by_one() -> None:
    weight = quantize_int4(torch.randn(3, 5, 64))
    for expert, got in enumerate(dequantize_int4(weight)):
        assert torch.equal(got, naive_int4(weight.packed[expert], weight.scales[expert], 32))


@pytest.mark.parametrize("group_size", [8, 32, 64])
def test_int4_rounds_to_the_nearest_code(group_size: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 128)
    weight[0] = 0
    quantised = quantize_int4(weight, group_size)
    assert quantised.scales.dtype == torch.bfloat16
    error = (dequantize(quantised) - weight).abs()
    # Half a step; a group's most positive value may stand half a step above code 7, and scales are rounded to bf16.
    step = quantised.scales.float().repeat_interleave(group_size, dim=1)
    assert (error <= step * (0.5 + 8 / 256)).all()
    assert torch.equal(dequantize(quantised)[0], torch.zeros(128))


def test_quantising_what_was_dequantised_changes_nothing() -> None:
    codes = torch.randint(-8, 8, (9, 64), dtype=torch.int8)
    codes[:, ::32], codes[:, 1::32] = -8, 7
    scales = torch.full((9, 2), 0.125, dtype=torch.bfloat16)
    once = Int4Weight(packed=pack_nibbles(codes), scales=scales)
    fp8 = quantize_fp8(torch.randn(200, 130))
    assert torch.equal(dequantize(quantize_fp8(dequantize(fp8))), dequantize(fp8))
    assert torch.equal(dequantize(once), codes.float() * 0.125)


@pytest.mark.parametrize(("shape", "block_size"), [((1, 1), 128), ((128, 256), 128), ((130, 200), 128), ((63, 65), 16)])
def test_fp8_dequantises_as_the_formula_does(shape: tuple[int, int], block_size: int) -> None:
    torch.manual_seed(0)
    rows, columns = shape
    values = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // block_size), -(-columns // block_size)) + 0.01
    weight = Fp8Weight(values=values, scales=scales, block_size=block_size)
    got = dequantize_fp8(weight)
    by_row, by_column = torch.arange(rows) // block_size, torch.arange(columns) // block_size
    assert torch.equal(got, values.float() * scales[by_row][:, by_column])


@pytest.mark.parametrize("shape", [(1, 1), (130, 200), (2, 200, 130)])
def test_fp8_uses_its_range_and_rounds_to_the_nearest(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    quantised = quantize_fp8(weight)
    assert quantised.scales.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    assert quantised.values.float().abs().max() == 448
    # e4m3 has three mantissa bits; below 2^-6 steps are 2^-9.
    error = (dequantize(quantised) - weight).abs()
    assert (error <= weight.abs() / 16 + quantised.scales.max() * 2**-10).all()


def test_zero_blocks_stay_zero() -> None:
    weight = torch.zeros(3, 200)
    assert torch.equal(dequantize(quantize_fp8(weight)), weight)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_nibbles(torch.full((1, 8), 8)), "^codes: got values 8 to 8, expected -8 to 7"),
        (lambda: pack_nibbles(torch.zeros(1, 7, dtype=torch.int8)), "^codes: got 7 columns, expected a multiple of 8"),
        (lambda: pack_nibbles(torch.zeros(1, 8)), "^codes: got torch.float32, expected an integer dtype"),
        (lambda: unpack_nibbles(torch.zeros(1, 8, dtype=torch.int64)), "^packed: got torch.int64"),
        (lambda: quantize_int4(torch.randn(2, 48)), "^group_size: got 32, expected a divisor of in_features 48"),
        (
            lambda: dequantize(Int4Weight(packed=torch.zeros(2, 8, dtype=torch.int32), scales=torch.ones(2, 3))),
            r"^scales: got shape \[2, 3\], expected \[2, 2\]",
        ),
        (
            lambda: dequantize(Fp8Weight(values=torch.zeros(130, 4).to(torch.float8_e4m3fn), scales=torch.ones(1, 1))),
            r"^scales: got shape \[1, 1\], expected \[2, 1\]",
        ),
        (
            lambda: dequantize(Fp8Weight(values=torch.zeros(2, 2), scales=torch.ones(1, 1))),
            "^values: got torch.float32, expected torch.float8_e4m3fn",
        ),
        (lambda: quantize_fp8(torch.randn(2, 2), 0), "^block_size: got 0"),
    ],
)
def test_a_wrong_argument_is_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
