"""The reference norms against plain float64 formulas, row by row."""

import math

import pytest
import torch
from torch import Tensor

from kimi_kernels.rms_norm.reference import add_rms_norm, chunked_rms_norm, concat_rms_norm, rms_norm

EPS = 1e-5
# One float32 rounding of a float64 result.
TOLERANCE = 1e-7
SIZES = [(0, 8), (1, 1), (1, 64), (3, 63), (63, 3), (65, 65)]


def naive_norm(row: list[float], weight: list[float], eps: float = EPS) -> list[float]:
    scale = math.sqrt(math.fsum(value * value for value in row) / len(row) + eps)
    return [value / scale * factor for value, factor in zip(row, weight, strict=True)]


def naive_norms(x: Tensor, weight: Tensor) -> Tensor:
    rows = [naive_norm(row, weight.double().tolist()) for row in x.double().tolist()]
    return torch.tensor(rows, dtype=torch.float64).view(x.shape)


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("num_tokens", "width"), SIZES)
def test_rms_norm(num_tokens: int, width: int) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(num_tokens, width) * 3, torch.randn(width)
    assert_close(rms_norm(x, weight, EPS), naive_norms(x, weight))


@pytest.mark.parametrize("scale", [0.0, 1e-18, 1e18])
def test_rms_norm_neither_overflows_nor_divides_by_zero(scale: float) -> None:
    x, weight = torch.randn(3, 16) * scale, torch.ones(16)
    assert_close(rms_norm(x, weight, EPS), naive_norms(x, weight))


def test_rms_norm_takes_strided_rows() -> None:
    x, weight = torch.randn(5, 100)[:, 30:94], torch.randn(64)
    assert torch.equal(rms_norm(x, weight, EPS), rms_norm(x.contiguous(), weight, EPS))


def test_rms_norm_rounds_once_to_the_dtype_of_x() -> None:
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
    assert torch.equal(rms_norm(x, weight, EPS), naive_norms(x, weight).bfloat16())


@pytest.mark.parametrize(("num_tokens", "width"), SIZES)
def test_add_rms_norm(num_tokens: int, width: int) -> None:
    torch.manual_seed(width)
    x, residual, weight = torch.randn(num_tokens, width), torch.randn(num_tokens, width), torch.randn(width)
    before = residual.clone()
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, before)
    assert torch.equal(total, x + residual)
    assert_close(normed, naive_norms(x + residual, weight))


def test_add_rms_norm_norms_what_it_returns() -> None:
    x, residual, weight = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.randn(64)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert total.dtype == normed.dtype == torch.bfloat16
    assert torch.equal(total, (x.double() + residual.double()).bfloat16())
    assert torch.equal(normed, rms_norm(total, weight, EPS))


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 65])
def test_concat_rms_norm_norms_each_half_by_itself(num_tokens: int) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(num_tokens, 48), torch.randn(num_tokens, 33) * 100
    a_weight, b_weight = torch.randn(48), torch.randn(33)
    expected = torch.cat((naive_norms(a, a_weight), naive_norms(b, b_weight)), dim=-1)
    assert_close(concat_rms_norm(a, a_weight, b, b_weight, EPS), expected)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 65])
def test_chunked_rms_norm_norms_each_chunk_by_itself(num_tokens: int) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(num_tokens, 63), torch.randn(3, 21)
    x[:, :21] *= 100
    expected = torch.cat([naive_norms(part, weight) for part, weight in zip(x.chunk(3, -1), weights, strict=True)], -1)
    assert_close(chunked_rms_norm(x, weights, EPS), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(torch.randn(2, 3), torch.randn(4), EPS), r"^x: got shape \[2, 3\], expected \[any, 4\]"),
        (lambda: rms_norm(torch.randn(2, 3), torch.randn(1, 3), EPS), r"^weight: got shape \[1, 3\], expected \[any\]"),
        (lambda: rms_norm(torch.ones(2, 3, dtype=torch.int32), torch.randn(3), EPS), "^x: got torch.int32"),
        (lambda: add_rms_norm(torch.randn(2, 3), torch.randn(3, 3), torch.randn(3), EPS), r"^residual: .*\[3, 3\]"),
        (
            lambda: concat_rms_norm(torch.randn(2, 3), torch.randn(3), torch.randn(1, 4), torch.randn(4), EPS),
            r"^b: got shape \[1, 4\], expected \[2, 4\]",
        ),
        (lambda: chunked_rms_norm(torch.randn(2, 7), torch.randn(2, 3), EPS), r"^x: .*expected \[any, 6\]"),
        (lambda: chunked_rms_norm(torch.randn(2, 0), torch.randn(0, 3), EPS), "^weights: .*at least one chunk"),
    ],
)
def test_a_wrong_argument_is_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
