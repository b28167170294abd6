"""The reference gated activation against the formula, element by element."""

import math

import pytest
import torch

from kimi_kernels.silu_mul.reference import silu_mul


@pytest.mark.parametrize(("num_tokens", "width"), [(0, 4), (1, 1), (3, 63), (65, 16)])
def test_silu_mul(num_tokens: int, width: int) -> None:
    torch.manual_seed(width)
    gate_up = torch.randn(num_tokens, 2 * width) * 4
    rows = gate_up.double().tolist()
    expected = [
        [gate / (1 + math.exp(-gate)) * up for gate, up in zip(row[:width], row[width:], strict=True)] for row in rows
    ]
    expected = torch.tensor(expected, dtype=torch.float64).view(num_tokens, width)
    torch.testing.assert_close(silu_mul(gate_up).double(), expected, rtol=1e-7, atol=1e-30)


def test_silu_mul_is_finite_for_any_gate() -> None:
    gate_up = torch.tensor([[-3e38, -800.0, 0.0, 800.0, 1e38, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert torch.equal(silu_mul(gate_up), torch.tensor([[0.0, 0.0, 0.0, 800.0, 1e38]]))


def test_silu_mul_takes_strided_rows_and_keeps_the_dtype() -> None:
    wide = torch.randn(6, 40).bfloat16()
    out = silu_mul(wide[::2, 4:36])
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, silu_mul(wide[::2, 4:36].contiguous()))


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.randn(2, 5), "^gate_up: got 5 columns, expected an even number"),
        (torch.randn(4), r"^gate_up: got shape \[4\], expected \[any, any\]"),
        (torch.ones(2, 4, dtype=torch.int64), "^gate_up: got torch.int64"),
    ],
)
def test_a_wrong_argument_is_named(gate_up: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        silu_mul(gate_up)
