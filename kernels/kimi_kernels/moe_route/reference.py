"""Reference of the router: float64 sigmoid, stable sorts, sums in a fixed order."""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_dtype, require_shape

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
        ValueError: a shape or dtype is wrong, the experts do not divide into groups, or the chosen groups hold fewer
            than top_k experts.
    """
    require_shape("router_logits", router_logits, None, None)
    require_dtype("router_logits", router_logits, torch.float32)
    num_experts = router_logits.shape[1]
    require_shape("correction_bias", correction_bias, num_experts)
    require_dtype("correction_bias", correction_bias, torch.float32)
    divides = num_groups > 0 and num_experts % num_groups == 0
    require(divides, "num_groups", num_groups, f"a divisor of the {num_experts} experts")
    require(0 < topk_groups <= num_groups, "topk_groups", topk_groups, f"1 to num_groups {num_groups}")
    eligible = num_experts // num_groups * topk_groups
    require(0 < top_k <= eligible, "top_k", top_k, f"1 to the {eligible} experts of topk_groups groups")

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
