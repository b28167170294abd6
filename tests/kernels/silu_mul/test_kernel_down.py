"""A narrow layer's activation and second product in Triton-language's interpreter, against the two ops."""

import pytest
import torch

from kimi_kernels.linear.kernel import linear, pack_linear
from kimi_kernels.silu_mul.kernel import silu_mul
from kimi_kernels.silu_mul.kernel_down import MOST_ROWS, MOST_WIDTH, silu_down
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED


@pytest.mark.parametrize(
    ("rows", "width", "out"), [(1, 32, 64), (5, 40, 100), (20, 256, 130), (70, 32, 64), (MOST_ROWS + 1, 8, 16)]
)
def test_as_the_two_ops(rows: int, width: int, out: int) -> None:
    torch.manual_seed(rows)
    wide = torch.randn(rows, 2 * width + 16)[:, 16:]  # float32, of a product that others read from too
    weight = pack_linear((torch.randn(out, width) / width**0.5).half())
    found = silu_down(wide, weight, torch.float16)
    expected = linear(silu_mul(wide.half()), weight)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_gate_and_up_are_rounded_as_a_product_would_round_them() -> None:
    """1 + 2^-12 is 1 in a half, so silu is that of 1."""
    weight = pack_linear(torch.eye(16).half())
    found = silu_down(torch.full((1, 32), 1 + 2.0**-12), weight, torch.float16)
    assert torch.equal(found, silu_down(torch.ones(1, 32), weight, torch.float16))
    assert torch.equal(found, silu_mul(torch.ones(1, 32).half()))


def test_wide_layers_take_the_two_ops() -> None:
    torch.manual_seed(0)
    weight = pack_linear(torch.randn(16, MOST_WIDTH + 8).half())
    x = torch.randn(3, 2 * MOST_WIDTH + 16)
    assert torch.equal(silu_down(x, weight, torch.float16), linear(silu_mul(x.half()), weight))


def test_wrong_arguments_are_named() -> None:
    weight = pack_linear(torch.randn(16, 8).half())
    with pytest.raises(ValueError, match="gate_up: got shape"):
        silu_down(torch.randn(3, 8), weight, torch.float16)
    with pytest.raises(ValueError, match="gate_up: got column stride 2"):
        silu_down(torch.randn(3, 32)[:, ::2], weight, torch.float16)
