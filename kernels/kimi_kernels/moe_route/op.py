"""The router's contracts. T tokens of the step, E experts, K experts a token."""

from typing import Protocol

import torch
from torch import Tensor

from kimi_kernels.argument_checks import refuse, require_dtype, require_shape
from kimi_kernels.weights import PackedWeight


class RouteExperts(Protocol):
    """DeepSeek-V3's router (report, section 2.1.2): sigmoid scores, bias for the choice only, groups, top-k."""

    def __call__(
        self,
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
        """
        Args:
            router_logits: [T, E] float32. correction_bias: [E] float32.
            num_groups, topk_groups: only experts of the topk_groups best groups may be chosen; a group's score is the
                sum of its two best biased scores.
            slot_mapping: [T] int64; a row whose slot is -1 is padding and takes no expert: its ids are -1.
        Returns:
            topk_ids: [T, K] int32, best first, lowest id first among equals.
            topk_weights: [T, K] float32, unbiased scores, renormalised to sum 1 if asked, times scaling_factor.
        """
        ...


class RouteSiluDown(Protocol):
    """`RouteExperts` and `SiluDown` of columns of one product, neither of which reads the other's result."""

    def __call__(
        self,
        router_logits: Tensor,
        correction_bias: Tensor,
        gate_up: Tensor,
        weight: PackedWeight,
        dtype: torch.dtype,
        *,
        top_k: int,
        num_groups: int,
        topk_groups: int,
        renormalize: bool,
        scaling_factor: float,
        slot_mapping: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All arguments as of the two ops; topk_ids, topk_weights and the product, [T, out_features]."""
        ...


def check_router(
    router_logits: Tensor,
    correction_bias: Tensor,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    slot_mapping: Tensor | None,
) -> None:
    """Raise unless the arguments are those of `RouteExperts`, and topk_groups groups hold at least top_k experts."""
    check_logits(router_logits, slot_mapping)
    num_experts = router_logits.shape[1]
    if correction_bias.shape != (num_experts,):
        require_shape("correction_bias", correction_bias, num_experts)
    require_dtype("correction_bias", correction_bias, torch.float32)
    if num_groups <= 0 or num_experts % num_groups:
        refuse("num_groups", num_groups, f"a divisor of the {num_experts} experts")
    if not 0 < topk_groups <= num_groups:
        refuse("topk_groups", topk_groups, f"1 to num_groups {num_groups}")
    eligible = num_experts // num_groups * topk_groups
    if not 0 < top_k <= eligible:
        refuse("top_k", top_k, f"1 to the {eligible} experts of topk_groups groups")


def check_logits(router_logits: Tensor, slot_mapping: Tensor | None) -> None:
    """Raise unless the logits are a matrix of float32, and there is a slot for each row or none at all."""
    if router_logits.dim() != 2:
        require_shape("router_logits", router_logits, None, None)
    require_dtype("router_logits", router_logits, torch.float32)
    if slot_mapping is not None and slot_mapping.shape != router_logits.shape[:1]:
        require_shape("slot_mapping", slot_mapping, router_logits.shape[0])
