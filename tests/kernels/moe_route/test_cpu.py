"""The CPU kernel set's router: the reference's bits."""

import pytest
import torch

from kimi_kernels.moe_route import reference
from kimi_kernels.moe_route.cpu import route_experts


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 65])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "topk_groups"), [(12, 3, 1, 1), (384, 8, 1, 1), (24, 4, 4, 2), (7, 7, 1, 1)]
)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.0, 60.0])
def test_it_equals_the_reference_bit_for_bit(
    num_tokens: int, num_experts: int, top_k: int, num_groups: int, topk_groups: int, renormalize: bool, scale: float
) -> None:
    """Scale 0 makes every score equal; 60 makes many of them 0 or 1, which are equal too."""
    torch.manual_seed(num_tokens)
    logits, bias = torch.randn(num_tokens, num_experts) * scale, torch.randn(num_experts).round()
    slots = torch.arange(num_tokens)
    slots[1::3] = -1
    for slot_mapping in (None, slots, slots.clamp(min=0)):
        results = [
            op(
                logits,
                bias,
                top_k=top_k,
                num_groups=num_groups,
                topk_groups=topk_groups,
                renormalize=renormalize,
                scaling_factor=2.827,
                slot_mapping=slot_mapping,
            )
            for op in (route_experts, reference.route_experts)
        ]
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_more_choices_than_experts_are_refused() -> None:
    settings = {"num_groups": 1, "topk_groups": 1, "renormalize": True, "scaling_factor": 1.0}
    with pytest.raises(ValueError, match="top_k: got 5"):
        route_experts(torch.randn(2, 4), torch.zeros(4), top_k=5, **settings)
