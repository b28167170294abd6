"""The router in torch: float64 sigmoid, stable sorts, sums in a fixed order."""

import torch
from torch import Tensor

from kimi_kernels.constants import constant
from kimi_kernels.moe_route.op import check_router
from kimi_kernels.paged_rows import has_padding

RENORMALIZE_EPS = 1e-20
NO_EXPERT = -1


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
    """`RouteExperts`."""
    check_router(router_logits, correction_bias, top_k, num_groups, topk_groups, slot_mapping)
    # In float64, whose last bit may depend on where a row stands: rounding takes it away.
    scores = router_logits.double().sigmoid_().float()
    biased = scores + correction_bias
    if topk_groups < num_groups:
        biased = _mask_groups(biased, num_groups, topk_groups)
    topk_ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, topk_ids).double()
    if renormalize:
        # cumsum adds from left to right, whatever the number of rows.
        weights /= weights.cumsum(dim=-1)[:, -1:].add_(constant(RENORMALIZE_EPS, torch.float64))
    topk_ids = without_padding(topk_ids.int(), slot_mapping)
    return topk_ids, weights.mul_(constant(scaling_factor, torch.float64)).float()


def without_padding(topk_ids: Tensor, slot_mapping: Tensor | None) -> Tensor:
    """The choices of rows that are no padding, in place."""
    if slot_mapping is None or not has_padding(slot_mapping):
        return topk_ids
    return topk_ids.masked_fill_((slot_mapping < 0)[:, None], NO_EXPERT)


def _mask_groups(biased: Tensor, num_groups: int, topk_groups: int) -> Tensor:
    """Set the scores of experts outside the best groups to -inf; a group scores the sum of its two best."""
    grouped = biased.view(biased.shape[0], num_groups, biased.shape[1] // num_groups)
    group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.cumsum(dim=-1)[..., -1]
    best = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
    excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(-2)
