"""The rotary embedding in Triton-language's interpreter against the reference."""

import pytest
import torch

from kimi_kernels.rope import kernel, reference
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""One rounding to the type; the interpreter rounds bfloat16 towards zero."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 2), (3, 17, 64), (2, 5, 24)])
def test_rope(tokens: int, heads: int, width: int, interleaved: bool, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, heads, width).to(dtype)
    cos_sin = torch.randn(50, width)
    positions = torch.randint(50, (tokens,))
    out = kernel.rope(x, cos_sin, positions, interleaved)
    expected = reference.rope(x, cos_sin, positions, interleaved)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_part_of_a_wider_tensor() -> None:
    wide = torch.full((4, 3, 48), torch.nan)
    wide[:, :, 32:] = torch.randn(4, 3, 16)
    cos_sin, positions = torch.randn(9, 16), torch.tensor([8, 0, 3, 3])
    torch.testing.assert_close(
        kernel.rope(wide[:, :, 32:], cos_sin, positions, True),
        reference.rope(wide[:, :, 32:], cos_sin, positions, True),
        rtol=1e-6,
        atol=1e-6,
    )


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="positions"):
        kernel.rope(torch.ones(1, 1, 4), torch.ones(3, 4), torch.zeros(1, dtype=torch.int32), True)
