"""The rotary embedding, each implementation against turned complex numbers."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kimi_kernels.rope import naive
from support.implementations import FLOATS, assert_rounded, implementations

POSITIONS = 300
every_implementation = implementations("rope")


def table(width: int) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def check(ops: ModuleType, x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> None:
    expected = naive.rope(x, cos_sin, positions, interleaved)
    assert_rounded(ops, ops.rope(x, cos_sin, positions, interleaved), expected, x.dtype)


@every_implementation
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_heads", "width"), [(1, 2), (17, 64), (5, 24), (3, 10)])
def test_each_pair_is_turned(
    ops: ModuleType, num_heads: int, width: int, dtype: torch.dtype, interleaved: bool
) -> None:
    """The plain one keeps the angles of up to 16 rows."""
    torch.manual_seed(width)
    for num_tokens in (0, 1, 3, 3, 16, 17):
        x, positions = torch.randn(num_tokens, num_heads, width).to(dtype), torch.randint(POSITIONS, (num_tokens,))
        check(ops, x, table(width), positions, interleaved)


@every_implementation
def test_another_table_of_the_same_shape_gives_other_angles(ops: ModuleType) -> None:
    x, positions = torch.randn(2, 1, 8), torch.tensor([0, 3])
    tables = torch.randn(2, 5, 8).unbind()
    for cos_sin in (*tables, *tables):
        check(ops, x, cos_sin, positions, True)


@every_implementation
@pytest.mark.parametrize("interleaved", [True, False])
def test_heads_may_be_part_of_a_wider_tensor(ops: ModuleType, interleaved: bool) -> None:
    wide = torch.full((20, 3, 48), torch.nan)
    wide[:, :, 32:] = torch.randn(20, 3, 16)
    before, positions = wide.clone(), torch.arange(20)
    check(ops, wide[:, :, 32:], table(16), positions, interleaved)
    torch.testing.assert_close(wide, before, rtol=0, atol=0, equal_nan=True)


@every_implementation
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(2, 1, 3), "cos_sin": table(4)}, "^x: got 3 columns, expected an even number"),
        ({"x": torch.randn(2, 4)}, r"^x: got shape \[2, 4\]"),
        ({"x": torch.ones(2, 1, 4).int()}, "^x: got torch.int32"),
        ({"x": torch.randn(2, 1, 8)[..., ::2]}, "^x: got column stride 2, expected 1"),
        ({"cos_sin": table(6)}, r"^cos_sin: got shape \[300, 6\], expected \[any, 4\]"),
        ({"cos_sin": table(4).double()}, "^cos_sin: got torch.float64"),
        ({"cos_sin": table(8)[:, ::2]}, "^cos_sin: got strides"),
        ({"positions": torch.arange(3)}, r"^positions: got shape \[3\], expected \[2\]"),
        ({"positions": torch.arange(2).int()}, "^positions: got torch.int32, expected torch.int64"),
    ],
)
def test_a_wrong_argument_is_named(ops: ModuleType, change: dict[str, Tensor], message: str) -> None:
    arguments = {"x": torch.randn(2, 1, 4), "cos_sin": table(4), "positions": torch.arange(2)} | change
    with pytest.raises(ValueError, match=message):
        ops.rope(**arguments, interleaved=True)
