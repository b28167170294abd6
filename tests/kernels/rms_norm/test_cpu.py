"""The CPU kernel set's norms against the reference's float64 ones."""

import pytest
import torch

from kimi_kernels.rms_norm import reference
from kimi_kernels.rms_norm.cpu import add_rms_norm, chunked_rms_norm, concat_rms_norm, rms_norm

EPS = 1e-6
# A float32 mean of up to 7,168 squares, a root and two products.
TOLERANCE = {"rtol": 2e-6, "atol": 1e-7}
SIZES = [(0, 64), (1, 1), (3, 63), (4, 192), (65, 7168)]


@pytest.mark.parametrize(("num_tokens", "width"), SIZES)
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_norms_equal_the_reference(num_tokens: int, width: int, scale: float) -> None:
    torch.manual_seed(width)
    x, residual = torch.randn(num_tokens, width) * scale, torch.randn(num_tokens, width)
    weight, other = torch.randn(width), torch.randn(2 * width)
    wide = torch.randn(num_tokens, 2 * width)
    torch.testing.assert_close(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), **TOLERANCE)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    expected_normed, expected_total = reference.add_rms_norm(x, residual, weight, EPS)
    torch.testing.assert_close(normed, expected_normed, **TOLERANCE)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(
        concat_rms_norm(x, weight, wide, other, EPS),
        reference.concat_rms_norm(x, weight, wide, other, EPS),
        **TOLERANCE,
    )
    chunks = other.view(2, width)
    torch.testing.assert_close(
        chunked_rms_norm(wide, chunks, EPS), reference.chunked_rms_norm(wide, chunks, EPS), **TOLERANCE
    )


def test_strided_rows_are_normed_in_place_of_nothing() -> None:
    wide, weight = torch.randn(5, 90), torch.randn(48)
    part = wide[:, 7:55]
    before = wide.clone()
    assert torch.equal(rms_norm(part, weight, EPS), rms_norm(part.contiguous(), weight, EPS))
    add_rms_norm(part, part, weight, EPS)
    assert torch.equal(wide, before)


def test_other_dtypes_give_the_references_bits() -> None:
    x, weight = torch.randn(3, 32).bfloat16(), torch.randn(32).bfloat16()
    assert torch.equal(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


def test_a_width_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x: got shape \[2, 48\], expected \[any, 32\]"):
        rms_norm(torch.randn(2, 48), torch.randn(32), EPS)
    with pytest.raises(ValueError, match="residual: got shape"):
        add_rms_norm(torch.randn(2, 32), torch.randn(1, 32), torch.randn(32), EPS)
    with pytest.raises(ValueError, match="b: got shape"):
        concat_rms_norm(torch.randn(2, 32), torch.randn(32), torch.randn(1, 32), torch.randn(32), EPS)
    with pytest.raises(ValueError, match="x: got shape"):
        chunked_rms_norm(torch.randn(2, 32), torch.randn(3, 32), EPS)
