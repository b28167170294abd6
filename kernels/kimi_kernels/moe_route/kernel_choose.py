# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The choice of a token's experts in registers, for the router's kernel and for kernels that route in passing."""

import triton
import triton.language as tl

LAST = tl.constexpr(0x7FFFFFFF)
NONE = tl.constexpr(-(1 << 63))
EPS = tl.constexpr(1e-20)


@triton.jit
def sigmoid_scores(logits, expert):
    """The router's scores. Another function of a token's logits, and of the experts' ids, may stand for it."""
    return 1.0 / (1.0 + tl.exp(-logits))


@triton.jit
def _keys(values, index):
    """int64 that are in the order of the values, the lowest index the largest among equals."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & LAST)
    return (bits.to(tl.int64) << 32) | (index ^ LAST).to(tl.int64)


@triton.jit
def _pick_best(keys):
    """The index of the largest key, and the keys without it."""
    best = tl.max(keys, 0)
    return (best & LAST).to(tl.int32) ^ LAST, tl.where(keys == best, NONE, keys)


@triton.jit
def _keep_best_groups(biased, TOPK_GROUPS: tl.constexpr):
    """biased: [GROUPS, SIZE]; -inf outside the TOPK_GROUPS groups whose two best entries have the largest sum."""
    place = tl.arange(0, biased.shape[1])[None, :]
    first = tl.max(biased, axis=1)
    first_place = tl.argmax(biased, axis=1, tie_break_left=True)
    second = tl.max(tl.where(place == first_place[:, None], float("-inf"), biased), axis=1)
    # A group of one expert has no second.
    group = tl.arange(0, biased.shape[0])
    keys = _keys(tl.where(second > float("-inf"), first + second, first), group)
    kept = group < 0
    for _ in tl.static_range(TOPK_GROUPS):
        best, keys = _pick_best(keys)
        kept = kept | (group == best)
    return tl.where(kept[:, None], biased, float("-inf"))


@triton.jit
def choose_experts(
    LOGITS,
    BIAS,
    token,
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
):
    """A token's experts, best first, and their weights: two [TOP_K_PADDED], of which TOP_K count.

    Args:
        LOGITS: [T, num_groups * group_size] float32. BIAS: [num_groups * group_size] float32, or None.
        GROUPS, SIZE: num_groups and group_size, rounded up to powers of two.
        SCORES: as `sigmoid_scores`.
    """
    group = tl.arange(0, GROUPS)[:, None]
    place = tl.arange(0, SIZE)[None, :]
    is_expert = (group < num_groups) & (place < group_size)
    expert = group * group_size + place
    row = LOGITS + token.to(tl.int64) * logits_stride
    biased = SCORES(tl.load(row + expert, mask=is_expert, other=0.0), expert)
    if BIAS is not None:
        biased += tl.load(BIAS + expert, mask=is_expert, other=0.0)
    biased = tl.where(is_expert, biased, float("-inf"))
    if SELECT_GROUPS:
        biased = _keep_best_groups(biased, TOPK_GROUPS)
    # The padded index grows with the expert id, so the lowest index is the lowest id.
    keys = _keys(tl.reshape(biased, [GROUPS * SIZE]), tl.arange(0, GROUPS * SIZE))
    rank = tl.arange(0, TOP_K_PADDED)
    ids = tl.zeros([TOP_K_PADDED], tl.int32)
    for k in tl.static_range(TOP_K):
        best, keys = _pick_best(keys)
        ids = tl.where(rank == k, best // SIZE * group_size + best % SIZE, ids)
    weights = SCORES(tl.load(row + ids, mask=rank < TOP_K, other=0.0), ids)
    weights = tl.where(rank < TOP_K, weights, 0.0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights) + EPS)
    return ids, weights * scaling_factor
