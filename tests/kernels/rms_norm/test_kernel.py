"""The norms in Triton-language's interpreter against the reference."""

import pytest
import torch
from torch import Tensor

from kimi_kernels.rms_norm import cpu, kernel, reference
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED
EPS = 1e-5
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
"""One rounding to the type; the interpreter rounds bfloat16 towards zero."""


def close(out: Tensor, expected: Tensor) -> None:
    assert out.dtype == expected.dtype and out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[out.dtype], atol=TOLERANCE[out.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 48), (5, 64), (2, 100)])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    close(kernel.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


def test_rms_norm_of_rows_that_lie_apart() -> None:
    wide = torch.full((4, 100), torch.nan)
    wide[:, 20:68] = torch.randn(4, 48)
    weight = torch.randn(48)
    close(kernel.rms_norm(wide[:, 20:68], weight, EPS), reference.rms_norm(wide[:, 20:68], weight, EPS))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(3, 72).to(dtype), torch.randn(3, 72).to(dtype), torch.randn(72).to(dtype))
    before = x.clone(), residual.clone()
    normed, total = kernel.add_rms_norm(x, residual, weight, EPS)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, EPS)
    close(normed, expected)
    close(total, expected_total)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_rms_norm_of_two_addends(dtype: torch.dtype) -> None:
    """The sum of both addends is one that rounds, as an addition of its own before: with halves, 1 + 2^-11 is 1."""
    x, second, residual = (torch.randn(3, 72).to(dtype) for _ in range(3))
    if dtype == torch.float16:
        x[0], second[0], residual[0] = 1.0, 2.0**-11, -1.0
    weight = torch.randn(72).to(dtype)
    expected, expected_total = reference.add_rms_norm(x + second, residual, weight, EPS)
    for ours in (kernel.add_rms_norm, reference.add_rms_norm, cpu.add_rms_norm):
        normed, total = ours(x, residual, weight, EPS, second)
        close(normed, expected)
        close(total, expected_total)
        if dtype == torch.float16:
            assert not total[0].any()


def test_concat_rms_norm_of_different_widths() -> None:
    a, b = torch.randn(3, 48), torch.randn(3, 80)
    a_weight, b_weight = torch.randn(48), torch.randn(80)
    close(
        kernel.concat_rms_norm(a, a_weight, b, b_weight, EPS),
        reference.concat_rms_norm(a, a_weight, b, b_weight, EPS),
    )


def test_chunked_rms_norm() -> None:
    x, weights = torch.randn(4, 3 * 40), torch.randn(3, 40)
    close(kernel.chunked_rms_norm(x, weights, EPS), reference.chunked_rms_norm(x, weights, EPS))


def test_no_rows() -> None:
    assert kernel.rms_norm(torch.empty(0, 16), torch.ones(16), EPS).shape == (0, 16)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="x: got shape"):
        kernel.rms_norm(torch.ones(2, 3), torch.ones(4), EPS)
    with pytest.raises(ValueError, match="x: got column stride 2, expected 1"):
        kernel.rms_norm(torch.ones(2, 8)[:, ::2], torch.ones(4), EPS)
