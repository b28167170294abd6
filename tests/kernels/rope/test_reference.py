"""The reference rotary embedding against rotations written as complex products."""

import cmath

import pytest
import torch
from torch import Tensor

from kimi_kernels.rope.reference import rope

MAX_POSITIONS = 300


def angles(width: int) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.arange(MAX_POSITIONS, dtype=torch.float64)[:, None] * frequencies


def table(width: int) -> Tensor:
    return torch.cat((angles(width).cos(), angles(width).sin()), dim=-1).float()


def naive_rope(x: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    num_tokens, num_heads, width = x.shape
    out, turn = x.double().clone(), angles(width)
    for token in range(num_tokens):
        for head in range(num_heads):
            for i in range(width // 2):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
                pair = complex(x[token, head, first].item(), x[token, head, second].item())
                turned = pair * cmath.rect(1, turn[int(positions[token]), i].item())
                out[token, head, first], out[token, head, second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_heads", "width"), [(0, 2, 4), (1, 1, 2), (3, 4, 16), (65, 3, 6)])
def test_rope_turns_each_pair(num_tokens: int, num_heads: int, width: int, interleaved: bool) -> None:
    torch.manual_seed(width)
    x = torch.randn(num_tokens, num_heads, width)
    positions = torch.randint(0, MAX_POSITIONS, (num_tokens,))
    out = rope(x, table(width), positions, interleaved)
    # The table is rounded to float32: 2^-24 of each cosine and sine.
    torch.testing.assert_close(out.double(), naive_rope(x, positions, interleaved), rtol=0, atol=1e-6)


def test_rope_takes_strided_heads_and_changes_nothing() -> None:
    q = torch.randn(5, 4, 40)
    before, positions = q.clone(), torch.arange(5)
    out = rope(q[..., 24:], table(16), positions, True)
    assert torch.equal(out, rope(q[..., 24:].contiguous(), table(16), positions, True))
    assert torch.equal(q, before)


def test_rope_keeps_the_dtype() -> None:
    x, positions = torch.randn(5, 4, 16), torch.arange(5)
    assert torch.equal(
        rope(x.bfloat16(), table(16), positions, False),
        rope(x.bfloat16().float(), table(16), positions, False).bfloat16(),
    )


@pytest.mark.parametrize(
    ("x", "cos_sin", "positions", "message"),
    [
        (torch.randn(2, 1, 3), table(4), torch.arange(2), "^x: got 3 columns, expected an even number"),
        (torch.randn(2, 4), table(4), torch.arange(2), r"^x: got shape \[2, 4\]"),
        (torch.randn(2, 1, 4), table(6), torch.arange(2), r"^cos_sin: got shape \[300, 6\], expected \[any, 4\]"),
        (torch.randn(2, 1, 4), table(4).double(), torch.arange(2), "^cos_sin: got torch.float64"),
        (torch.randn(2, 1, 4), table(4), torch.arange(3), r"^positions: got shape \[3\], expected \[2\]"),
        (torch.randn(2, 1, 4), table(4), torch.arange(2).int(), "^positions: got torch.int32, expected torch.int64"),
    ],
)
def test_a_wrong_argument_is_named(x: Tensor, cos_sin: Tensor, positions: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope(x, cos_sin, positions, True)
