"""`route_experts` in Triton-language: one warp a token, everything in registers."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.moe_route.kernel_choose import choose_experts, sigmoid_scores
from kimi_kernels.moe_route.op import check_logits, check_router


@triton.jit
def route_kernel(
    LOGITS,
    BIAS,
    TOPK_IDS,
    TOPK_WEIGHTS,
    SLOTS,
    logits_stride,
    group_size,
    num_groups,
    scaling_factor,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SELECT_GROUPS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCORES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token.

    Args:
        LOGITS, BIAS and the constants: as `choose_experts`.
        TOPK_IDS: [T, TOP_K] int32. TOPK_WEIGHTS: [T, TOP_K] float32.
        SLOTS: [T] int64, -1 for padding, or None.
    """
    if PDL:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    ids, weights = choose_experts(
        LOGITS, BIAS, token, logits_stride, group_size, num_groups, scaling_factor, TOP_K, TOP_K_PADDED, TOPK_GROUPS,
        GROUPS, SIZE, SELECT_GROUPS, RENORMALIZE, SCORES,
    )  # fmt: skip
    if SLOTS is not None:
        ids = tl.where(tl.load(SLOTS + token) < 0, -1, ids)
    rank = tl.arange(0, TOP_K_PADDED)
    target = token * TOP_K + rank
    tl.store(TOPK_IDS + target, ids, mask=rank < TOP_K)
    tl.store(TOPK_WEIGHTS + target, weights, mask=rank < TOP_K)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A call's logits and how experts are chosen by them: what kernels are launched with."""

    logits: Tensor
    """[T, experts] float32, columns contiguous."""
    bias: Tensor | None
    slot_mapping: Tensor | None = None
    top_k: int
    num_groups: int
    topk_groups: int
    renormalize: bool
    scaling_factor: float
    scores: Any
    """A function of the form of `sigmoid_scores`."""

    def new_routing(self) -> tuple[Tensor, Tensor]:
        """Room for ids and weights, [T, top_k] each."""
        shape, device = (self.logits.shape[0], self.top_k), self.logits.device
        ids = torch.empty(shape, dtype=torch.int32, device=device)
        return ids, torch.empty(shape, dtype=torch.float32, device=device)

    @property
    def sizes(self) -> tuple[int, int, int, float]:
        """logits_stride, group_size, num_groups and scaling_factor of `choose_experts`."""
        group_size = self.logits.shape[1] // self.num_groups
        return self.logits.stride(0), group_size, self.num_groups, self.scaling_factor

    @property
    def constants(self) -> dict[str, Any]:
        """Those of `choose_experts`."""
        return {
            "TOP_K": self.top_k,
            "TOP_K_PADDED": triton.next_power_of_2(self.top_k),
            "TOPK_GROUPS": self.topk_groups,
            "GROUPS": triton.next_power_of_2(self.num_groups),
            "SIZE": triton.next_power_of_2(self.logits.shape[1] // self.num_groups),
            "SELECT_GROUPS": self.topk_groups < self.num_groups,
            "RENORMALIZE": self.renormalize,
            "SCORES": self.scores,
        }


def router(router_logits: Tensor, correction_bias: Tensor, **settings: Any) -> Router:
    """The router of `RouteExperts`, whose settings these are."""
    by = Router(logits=_by_rows(router_logits), bias=correction_bias.contiguous(), scores=sigmoid_scores, **settings)
    check_router(router_logits, correction_bias, by.top_k, by.num_groups, by.topk_groups, by.slot_mapping)
    return by


def plain_router(router_logits: Tensor, scores: Any, **settings: Any) -> Router:
    """A router by other scores, without bias and groups."""
    by = Router(logits=_by_rows(router_logits), bias=None, scores=scores, num_groups=1, topk_groups=1, **settings)
    check_logits(router_logits, by.slot_mapping)
    return by


def route(by: Router) -> tuple[Tensor, Tensor]:
    """The router's choices, as of `RouteExperts`."""
    topk_ids, topk_weights = by.new_routing()
    if len(topk_ids):
        route_kernel[(len(topk_ids),)](
            by.logits, by.bias, topk_ids, topk_weights, by.slot_mapping, *by.sizes, **by.constants, num_warps=1,
            **pdl_options(topk_ids.device),
        )  # fmt: skip
    return topk_ids, topk_weights


def route_experts(router_logits: Tensor, correction_bias: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """`RouteExperts`."""
    return route(router(router_logits, correction_bias, **settings))


def _by_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride()[-1:] == (1,) else logits.contiguous()
