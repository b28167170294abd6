"""The gated activation in Triton-language's interpreter against the reference."""

import pytest
import torch

from kimi_kernels.silu_mul import kernel, reference
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
"""One rounding to the type; the interpreter rounds bfloat16 towards zero."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 63), (2, 2049)])
def test_silu_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(rows, 2 * width)).to(dtype)
    out, expected = kernel.silu_mul(gate_up), reference.silu_mul(gate_up)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_rows_that_lie_apart() -> None:
    wide = torch.full((3, 50), torch.nan)
    wide[:, 5:37] = torch.randn(3, 32)
    torch.testing.assert_close(kernel.silu_mul(wide[:, 5:37]), reference.silu_mul(wide[:, 5:37]), rtol=2e-6, atol=2e-6)


def test_no_rows_and_wrong_widths() -> None:
    assert kernel.silu_mul(torch.empty(0, 8)).shape == (0, 4)
    with pytest.raises(ValueError, match="gate_up: got 3 columns"):
        kernel.silu_mul(torch.ones(2, 3))
