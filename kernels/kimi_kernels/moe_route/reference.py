"""Reference of the router: float64 sigmoid, stable sorts, sums in a fixed order."""

import torch
from torch import Tensor

from kimi_kernels.moe_route.arguments import check_router

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
    """`signatures.RouteExperts`.

    Raises:
        ValueError: as `check_router`.
    """
    check_router(
        router_logits,
        correction_bias,
        top_k=top_k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        slot_mapping=slot_mapping,
    )

    # Not torch.sigmoid: its vector and scalar paths differ in the last bit, and a row may fall to either.
    scores = (-router_logits.double()).exp_().add_(1).reciprocal_().float()
    biased = scores + correction_bias
    if topk_groups < num_groups:
        biased = _mask_groups(biased, num_groups, topk_groups)
    topk_ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, topk_ids).double()
    if renormalize:
        # cumsum adds from left to right, whatever the number of rows.
        weights = weights / (weights.cumsum(dim=-1)[:, -1:] + RENORMALIZE_EPS)
    return without_padding(topk_ids.to(torch.int32), slot_mapping), (weights * scaling_factor).float()


def without_padding(topk_ids: Tensor, slot_mapping: Tensor | None) -> Tensor:
    """The choices of rows that are no padding, in place."""
    return topk_ids if slot_mapping is None else topk_ids.masked_fill_((slot_mapping < 0)[:, None], NO_EXPERT)


def _mask_groups(biased: Tensor, num_groups: int, topk_groups: int) -> Tensor:
    """Set the scores of experts outside the best groups to -inf; a group scores the sum of its two best."""
    grouped = biased.view(biased.shape[0], num_groups, biased.shape[1] // num_groups)
    group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.cumsum(dim=-1)[..., -1]
    best = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
    excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(-2)
