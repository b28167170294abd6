"""The router and a narrow second product in one launch, in Triton-language's interpreter, against the two ops."""

from typing import Any

import pytest
import torch

from kimi_kernels.compositions import composed_route_silu_down
from kimi_kernels.linear.kernel import pack_linear
from kimi_kernels.moe_route.kernel import route_experts
from kimi_kernels.moe_route.kernel_shared import route_silu_down
from kimi_kernels.silu_mul import kernel_down
from kimi_kernels.silu_mul.kernel_down import silu_down
from kimi_kernels.synthetic.kernel import route_uniform, route_uniform_silu_down
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED
KIMI: dict[str, Any] = {
    "top_k": 8,
    "num_groups": 1,
    "topk_groups": 1,
    "renormalize": True,
    "scaling_factor": 2.827,
}
MOST_ROWS = 24
"""Fewer than a device takes, as the interpreter needs 30 ms for each."""
GROUPS: dict[str, Any] = KIMI | {"top_k": 3, "num_groups": 4, "topk_groups": 2, "renormalize": False}


@pytest.mark.parametrize(
    ("num_tokens", "width", "settings", "is_uniform"),
    [(1, 32, KIMI, False), (5, 40, GROUPS, False), (20, 16, KIMI, True), (MOST_ROWS + 1, 8, GROUPS, False)],
    ids=["one token", "groups and padding", "uniform", "many rows"],
)
def test_one_launch_has_the_bits_of_two(
    num_tokens: int, width: int, settings: dict[str, Any], is_uniform: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_down, "MOST_ROWS", MOST_ROWS)
    torch.manual_seed(num_tokens)
    columns = torch.randn(num_tokens, 48 + 2 * width)
    logits, gate_up = columns.tensor_split([48], dim=1)
    weight = pack_linear((torch.randn(100, width) / width**0.5).half())
    slots = torch.tensor([7, -1, 3, 2, -1]) if num_tokens == 5 else None
    arguments = (logits, torch.randn(48) * 0.1, gate_up, weight, torch.float16)
    fused = route_uniform_silu_down if is_uniform else route_silu_down
    composed = composed_route_silu_down(route_uniform if is_uniform else route_experts, silu_down)
    found, expected = (op(*arguments, slot_mapping=slots, **settings) for op in (fused, composed))
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == two.dtype and torch.equal(one, two)
    if slots is not None:
        assert (found[0][[1, 4]] == -1).all()


def test_wrong_arguments_are_named() -> None:
    weight = pack_linear(torch.randn(16, 8).half())
    with pytest.raises(ValueError, match="gate_up: got shape"):
        route_silu_down(torch.randn(3, 48), torch.zeros(48), torch.randn(3, 8), weight, torch.float16, **KIMI)
    with pytest.raises(ValueError, match="correction_bias: got shape"):
        route_silu_down(torch.randn(3, 48), torch.zeros(9), torch.randn(3, 16), weight, torch.float16, **KIMI)
