"""`route_experts` in Triton-language: one warp a token, everything in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_kernels.moe_route.arguments import check_router

RENORMALIZE_EPS = 1e-20


@triton.jit
def _pick_best(values, index):
    """The largest value's index, the lowest among equals, and the values without it."""
    best = tl.argmax(values, axis=0, tie_break_left=True)
    return best, tl.where(index == best, float("-inf"), values)


@triton.jit
def _keep_best_groups(biased, TOPK_GROUPS: tl.constexpr):
    """biased: [GROUPS, SIZE]; -inf outside the TOPK_GROUPS groups whose two best entries have the largest sum."""
    place = tl.arange(0, biased.shape[1])[None, :]
    first = tl.max(biased, axis=1)
    first_place = tl.argmax(biased, axis=1, tie_break_left=True)
    second = tl.max(tl.where(place == first_place[:, None], float("-inf"), biased), axis=1)
    # A group of one expert has no second.
    group_scores = tl.where(second > float("-inf"), first + second, first)
    group = tl.arange(0, biased.shape[0])
    kept = group < 0
    for _ in tl.static_range(TOPK_GROUPS):
        best, group_scores = _pick_best(group_scores, group)
        kept = kept | (group == best)
    return tl.where(kept[:, None], biased, float("-inf"))


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
    EPS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    """One program a token.

    Args:
        LOGITS: [T, num_groups * group_size] float32. BIAS: [num_groups * group_size] float32.
        TOPK_IDS: [T, TOP_K] int32. TOPK_WEIGHTS: [T, TOP_K] float32.
        SLOTS: [T] int64, -1 for padding.
        GROUPS, SIZE: num_groups and group_size, rounded up to powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)[:, None]
    place = tl.arange(0, SIZE)[None, :]
    is_expert = (group < num_groups) & (place < group_size)
    expert = group * group_size + place
    logits = tl.load(LOGITS + token * logits_stride + expert, mask=is_expert, other=0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    biased = tl.where(is_expert, scores + tl.load(BIAS + expert, mask=is_expert, other=0.0), float("-inf"))
    if SELECT_GROUPS:
        biased = _keep_best_groups(biased, TOPK_GROUPS)
    # The padded index grows with the expert id, so the lowest index is the lowest id.
    biased = tl.reshape(biased, [GROUPS * SIZE])
    scores = tl.reshape(scores, [GROUPS * SIZE])
    index = tl.arange(0, GROUPS * SIZE)
    rank = tl.arange(0, TOP_K_PADDED)
    ids = tl.zeros([TOP_K_PADDED], tl.int32)
    weights = tl.zeros([TOP_K_PADDED], tl.float32)
    for k in tl.static_range(TOP_K):
        best, biased = _pick_best(biased, index)
        ids = tl.where(rank == k, best // SIZE * group_size + best % SIZE, ids)
        weights = tl.where(rank == k, tl.sum(tl.where(index == best, scores, 0.0)), weights)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights) + EPS)
    target = token * TOP_K + rank
    if HAS_SLOTS:
        ids = tl.where(tl.load(SLOTS + token) < 0, -1, ids)
    tl.store(TOPK_IDS + target, ids, mask=rank < TOP_K)
    tl.store(TOPK_WEIGHTS + target, weights * scaling_factor, mask=rank < TOP_K)


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
    num_tokens, num_experts = router_logits.shape
    if router_logits.stride(1) != 1:
        router_logits = router_logits.contiguous()
    topk_ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=router_logits.device)
    topk_weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=router_logits.device)
    if num_tokens == 0:
        return topk_ids, topk_weights
    group_size = num_experts // num_groups
    route_kernel[(num_tokens,)](
        router_logits,
        correction_bias.contiguous(),
        topk_ids,
        topk_weights,
        topk_ids if slot_mapping is None else slot_mapping,
        router_logits.stride(0),
        group_size,
        num_groups,
        scaling_factor,
        TOP_K=top_k,
        TOP_K_PADDED=triton.next_power_of_2(top_k),
        TOPK_GROUPS=topk_groups,
        GROUPS=triton.next_power_of_2(num_groups),
        SIZE=triton.next_power_of_2(group_size),
        SELECT_GROUPS=topk_groups < num_groups,
        RENORMALIZE=renormalize,
        EPS=RENORMALIZE_EPS,
        HAS_SLOTS=slot_mapping is not None,
        num_warps=1,
    )
    return topk_ids, topk_weights
