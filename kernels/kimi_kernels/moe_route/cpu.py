"""The router with fewer checks and copies than the reference; the same bits."""

import torch
from torch import Tensor

from kimi_kernels.constants import constant
from kimi_kernels.moe_route import reference
from kimi_kernels.moe_route.reference import RENORMALIZE_EPS, without_padding
from kimi_kernels.paged_rows import has_padding


def route_experts(
    router_logits: Tensor,
    correction_bias: Tensor,
    *,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scaling_factor: float,
    slot_mapping: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`signatures.RouteExperts`.

    Raises:
        ValueError: as the reference.
    """
    is_plain = num_groups == topk_groups == 1 and router_logits.dtype == correction_bias.dtype == torch.float32
    if not is_plain or router_logits.shape[1:] != correction_bias.shape or not 0 < top_k <= len(correction_bias):
        return reference.route_experts(
            router_logits,
            correction_bias,
            top_k=top_k,
            num_groups=num_groups,
            topk_groups=topk_groups,
            renormalize=renormalize,
            scaling_factor=scaling_factor,
            slot_mapping=slot_mapping,
        )
    # In float64, whose last bit may depend on where a row stands: rounding takes it away.
    scores = router_logits.double().sigmoid_().float()
    topk_ids = (scores + correction_bias).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, topk_ids).double()
    if renormalize:
        weights /= weights.cumsum(dim=-1)[:, -1:].add_(constant(RENORMALIZE_EPS, torch.float64))
    topk_ids = topk_ids.int()
    if slot_mapping is not None and has_padding(slot_mapping):
        topk_ids = without_padding(topk_ids, slot_mapping)
    return topk_ids, weights.mul_(constant(scaling_factor, torch.float64)).float()
