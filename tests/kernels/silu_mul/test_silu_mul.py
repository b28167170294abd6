"""The gated activation, each implementation against its formula in float64."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kimi_kernels.silu_mul import naive
from support.implementations import FLOATS, assert_rounded, implementations

every_implementation = implementations("silu_mul")


@every_implementation
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 4), (1, 1), (3, 63), (2, 2049), (65, 16)])
def test_silu_mul(ops: ModuleType, num_tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (4 * torch.randn(num_tokens, 2 * width)).to(dtype)
    before = gate_up.clone()
    assert_rounded(ops, ops.silu_mul(gate_up), naive.silu_mul(gate_up), dtype)
    assert torch.equal(gate_up, before)


@every_implementation
def test_the_result_is_finite_for_any_gate(ops: ModuleType) -> None:
    gate_up = torch.tensor([[-3e38, -800.0, 0.0, 800.0, 1e38, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert torch.equal(ops.silu_mul(gate_up), torch.tensor([[0.0, 0.0, 0.0, 800.0, 1e38]]))


@every_implementation
def test_rows_may_lie_apart(ops: ModuleType) -> None:
    wide = torch.full((6, 50), torch.nan)
    wide[::2, 5:37] = torch.randn(3, 32)
    part = wide[::2, 5:37]
    assert_rounded(ops, ops.silu_mul(part), naive.silu_mul(part), torch.float32)


@every_implementation
@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.randn(2, 5), "^gate_up: got 5 columns, expected an even number"),
        (torch.randn(4), r"^gate_up: got shape \[4\], expected \[any, any\]"),
        (torch.ones(2, 4, dtype=torch.int64), "^gate_up: got torch.int64"),
        (torch.randn(2, 8)[:, ::2], "^gate_up: got column stride 2, expected 1"),
    ],
)
def test_a_wrong_argument_is_named(ops: ModuleType, gate_up: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.silu_mul(gate_up)
