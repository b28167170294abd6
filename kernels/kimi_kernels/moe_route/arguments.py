"""Checks of the routers' arguments: all of them refuse the same."""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_dtype, require_shape


def check_router(
    router_logits: Tensor,
    correction_bias: Tensor,
    *,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    slot_mapping: Tensor | None,
) -> None:
    """
    Raises:
        ValueError: a shape or dtype is wrong, the experts do not divide into groups, or the chosen groups hold fewer
            than top_k experts.
    """
    require_shape("router_logits", router_logits, None, None)
    require_dtype("router_logits", router_logits, torch.float32)
    num_tokens, num_experts = router_logits.shape
    require_shape("correction_bias", correction_bias, num_experts)
    require_dtype("correction_bias", correction_bias, torch.float32)
    divides = num_groups > 0 and num_experts % num_groups == 0
    require(divides, "num_groups", num_groups, f"a divisor of the {num_experts} experts")
    require(0 < topk_groups <= num_groups, "topk_groups", topk_groups, f"1 to num_groups {num_groups}")
    eligible = num_experts // num_groups * topk_groups
    require(0 < top_k <= eligible, "top_k", top_k, f"1 to the {eligible} experts of topk_groups groups")
    if slot_mapping is not None:
        require_shape("slot_mapping", slot_mapping, num_tokens)
