# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The race of the tokens of one split: who has the best score, with exact noise for the few that may have it.

For rows that filter, the same reading sums the mass: all of it, and what lies above a logit that most of it lies above,
which is enough to know that most candidates survive top-p.
"""

import triton
import triton.language as tl

from kimi_kernels.sampling.kernel_noise import (
    LOG2_E,
    NO_TOKEN,
    bits_of_blocks,
    bits_of_tokens,
    from_order_key,
    gumbel,
    is_not_finite,
    likelihood,
    load_columns,
    lowered_bound,
    order_key,
    reach,
    signed_key,
)
from kimi_kernels.sampling.kernel_rows import best_of, load_tile, tile_columns

LEAST_FACTOR = tl.constexpr(2.0**-99)
"""Above 0, so that an infinite likelihood stays infinite."""
HIGH_SHARE = tl.constexpr(0.96)
"""The share of top-p of the first tile's mass that the split's "high" logit leaves above it."""
HIGH_RANGE = tl.constexpr(32.0)
HIGH_STEPS = tl.constexpr(8)


@triton.jit
def insert(best, token, s0, s1, s2, s3, t0, t1, t2, t3):
    """Put one candidate into four that are sorted by score, best first, the lowest token first among equals."""
    before_0 = (best > s0) | ((best == s0) & (token < t0))
    before_1 = (best > s1) | ((best == s1) & (token < t1))
    before_2 = (best > s2) | ((best == s2) & (token < t2))
    before_3 = (best > s3) | ((best == s3) & (token < t3))
    s3 = tl.where(before_2, s2, tl.where(before_3, best, s3))
    t3 = tl.where(before_2, t2, tl.where(before_3, token, t3))
    s2 = tl.where(before_1, s1, tl.where(before_2, best, s2))
    t2 = tl.where(before_1, t1, tl.where(before_2, token, t2))
    s1 = tl.where(before_0, s0, tl.where(before_1, best, s1))
    t1 = tl.where(before_0, t0, tl.where(before_1, token, t1))
    s0 = tl.where(before_0, best, s0)
    t0 = tl.where(before_0, token, t0)
    return s0, s1, s2, s3, t0, t1, t2, t3


@triton.jit
def _insert_best(score, token, s0, s1, s2, s3, t0, t1, t2, t3):
    """Put a tile's best four into the best four."""
    for _ in tl.static_range(4):
        best, first = best_of(score, token)
        if best > -float("inf"):
            s0, s1, s2, s3, t0, t1, t2, t3 = insert(best, first, s0, s1, s2, s3, t0, t1, t2, t3)
        score = tl.where(token == first, -float("inf"), score)
    return s0, s1, s2, s3, t0, t1, t2, t3


@triton.jit
def _high_of_tile(raw, weight, share):
    """A logit of the tile, or -inf, above which lies about that share of its mass, and not more."""
    limit = share * tl.sum(weight)
    top = tl.max(weight)
    low = tl.full((), 0.0 - HIGH_RANGE, tl.float32)
    high = tl.full((), 0.0, tl.float32)
    for _ in tl.static_range(HIGH_STEPS):
        middle = (low + high) * 0.5
        is_more = tl.sum(tl.where(weight > top * tl.exp2(middle), weight, 0.0)) > limit
        low = tl.where(is_more, middle, low)
        high = tl.where(is_more, high, middle)
    return tl.max(tl.where(weight > top * tl.exp2(high), -float("inf"), raw))


@triton.jit
def _nearest(near):
    """The largest of a tile. Through int32, whose maximum is one instruction a warp; NaN is below all."""
    of_thread = tl.maximum(tl.max(near, 1), -1.0).to(tl.int32, bitcast=True)
    return tl.max(of_thread).to(tl.float32, bitcast=True)


@triton.jit
def _publish_bound(ROW_BOUND, row, bound):
    """Let the row's other splits know what its best reach."""
    tl.atomic_max(ROW_BOUND + row, order_key(bound), sem="relaxed")


@triton.jit
def noisy_split(
    source, TOKEN_OF_COLUMN, ROW_BOUND, SUMS, TILE_BEST, start, stop, rules,
    BLOCKS: tl.constexpr, EVEN: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr,
):  # fmt: skip
    """Four best scores and tokens (only the first counts unless the row filters), largest y, whether not finite.

    Args:
        rules: (inverse temperature, key of the noise, whether the row filters, top-p).
        SUMS, TILE_BEST: as `draw_kernel`, of this split, for rows that filter.
    """
    inverse, noise_key, filters, top_p = rules
    index, key_low, key_high = noise_key
    minus_inf = -float("inf")
    scale = inverse * LOG2_E
    s0 = tl.full((), minus_inf, tl.float64)
    s1, s2, s3 = s0, s0, s0
    t0 = tl.full((), NO_TOKEN, tl.int32)
    t1, t2, t3 = t0, t0, t0
    floor = tl.full((), minus_inf, tl.float32)
    high = floor
    # What likelihoods are relative to: the floor, lowered; 0 while every logit was -inf.
    base = tl.full((), 0.0, tl.float32)
    mass = tl.zeros((BLOCKS,), tl.float32)
    mass_above = mass
    best_raw = tl.full((BLOCKS, 4), minus_inf, tl.float32)
    # The loop below is too irregular for the compiler to fetch ahead, so it does that itself.
    ahead = load_tile(source, start, stop, BLOCKS, EVEN, HAS_WORK)
    for at in tl.range(start, stop, BLOCKS * 4):
        # Warps may read different values here, so nothing but `near` may depend on them: no branch, no result.
        published = from_order_key(tl.maximum(tl.load(ROW_BOUND + source[3], volatile=True), order_key(minus_inf)))
        raw = ahead
        ahead = load_tile(source, at + BLOCKS * 4, stop, BLOCKS, EVEN, HAS_WORK)
        column = tile_columns(at, BLOCKS)
        is_open = column < stop
        best_raw = tl.maximum(best_raw, raw, propagate_nan=tl.PropagateNan.ALL)
        if HAS_MAP:
            token = tl.load(TOKEN_OF_COLUMN + column, mask=is_open, other=0).to(tl.int32)
            bits = bits_of_tokens(index, token, key_low, key_high)
        else:
            bits = bits_of_blocks(index, at // 4, key_low, key_high, BLOCKS)
        # Without a bound all would look near: all of the tile at once is then cheaper than one after another.
        is_first = floor == minus_inf
        if is_first:
            is_first = tl.max(raw) > minus_inf
        if is_first:
            if not HAS_MAP:
                token = column
            score = (raw * inverse).to(tl.float64) + gumbel(bits).to(tl.float64)
            score = tl.where(is_open, score, minus_inf)
            s0, s1, s2, s3, t0, t1, t2, t3 = _insert_best(score, token, s0, s1, s2, s3, t0, t1, t2, t3)
            floor = tl.where(filters, s3, s0).to(tl.float32)
            _publish_bound(ROW_BOUND, source[3], floor)
        last_base = base
        base = tl.where(floor > minus_inf, lowered_bound(floor), 0.0)
        weight = likelihood(raw, scale, base)
        if filters:
            if is_first & (high == minus_inf):
                high = _high_of_tile(raw, weight, top_p * HIGH_SHARE)
            moved = tl.exp2((last_base - base) * LOG2_E)
            mass = tl.where(mass > 0.0, mass * moved, 0.0) + tl.sum(weight, 1)
            mass_above = tl.where(mass_above > 0.0, mass_above * moved, 0.0)
            mass_above += tl.sum(tl.where(raw > high, weight, 0.0), 1)
            tl.store(TILE_BEST + (at - start) // (BLOCKS * 4), tl.max(signed_key(tl.max(raw, 1))))
        factor = tl.maximum(likelihood(base, LOG2_E, lowered_bound(tl.maximum(published, floor))), LEAST_FACTOR)
        # Outside the split raw is -inf, which almost never looks near and is never taken.
        near = tl.where(is_first, -1.0, reach(bits, weight, factor))
        nearest = _nearest(near)
        num_left = BLOCKS * 4  # each turn closes a column; counted, so that no value whatever makes this endless
        while (nearest >= 0.0) & (num_left > 0):
            num_left -= 1
            # The likeliest first, so that the bound rises fast whatever the order of the logits.
            at_column = tl.min(tl.where(near == nearest, column, NO_TOKEN))
            one = load_columns(source, at_column, at_column < stop, HAS_WORK) * inverse
            one_token = at_column
            if HAS_MAP:
                one_token = tl.load(TOKEN_OF_COLUMN + at_column, mask=at_column < stop, other=0).to(tl.int32)
            noise = gumbel(bits_of_tokens(index, one_token, key_low, key_high))
            score = one.to(tl.float64) + noise.to(tl.float64)
            if score > minus_inf:
                s0, s1, s2, s3, t0, t1, t2, t3 = insert(score, one_token, s0, s1, s2, s3, t0, t1, t2, t3)
            floor = tl.maximum(floor, tl.where(filters, s3, s0).to(tl.float32))
            _publish_bound(ROW_BOUND, source[3], floor)
            is_open = is_open & (column != at_column)
            bound = lowered_bound(tl.maximum(published, floor))
            factor = tl.maximum(likelihood(base, LOG2_E, bound), LEAST_FACTOR)
            near = tl.where(is_open, reach(bits, weight, factor), -1.0)
            nearest = _nearest(near)
    if filters:
        sum_all, sum_above = tl.sum(mass), tl.sum(mass_above)
        tl.store(SUMS, sum_all)
        tl.store(SUMS + 1, sum_above)
        tl.store(SUMS + 2, high * inverse)
        tl.store(SUMS + 3, base)
    best = tl.max(best_raw) * inverse
    bad = tl.max(is_not_finite(best_raw * inverse).to(tl.int32))
    return s0, s1, s2, s3, t0, t1, t2, t3, best, bad
