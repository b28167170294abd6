# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""First pass over the logits: the best tokens of each row by score, before any filter.

A row is cut into splits, one program each. The program that finishes a row last merges its splits. Rows that filter
nothing are then done; the others keep their best few as candidates for `kernel_check`: whoever is best by score among
the survivors is also the first survivor in the order of scores.

Almost no token can be among the best, and a cheap bound shows it (`reach`); exact noise is made for the few others.
"""

import triton
import triton.language as tl

from kimi_kernels.sampling.kernel_merge import merge_row
from kimi_kernels.sampling.kernel_noise import (
    GREEDY_BELOW,
    LOG2_E,
    NO_TOKEN,
    bits_of_blocks,
    bits_of_tokens,
    from_order_key,
    gumbel,
    gumbel_floor,
    inverse_temperature,
    is_not_finite,
    load_columns,
    lowered_bound,
    order_key,
    reach,
)
from kimi_kernels.sampling.kernel_rows import best_of, load_tile, tile_columns


@triton.jit
def _insert(best, token, s0, s1, s2, s3, t0, t1, t2, t3):
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
def _floor_of_tile(lower, keeps_four):
    """A bound that the best (or the four best) of a tile reach, from lower bounds of their scores."""
    floor = tl.max(lower)
    if keeps_four:
        for _ in tl.static_range(3):
            lower = tl.where(lower == floor, -float("inf"), lower)
            floor = tl.max(lower)
    return floor


@triton.jit
def _nearness(bits, raw, scale, bound):
    """`reach` as int32, whose order is the same and whose maximum is one instruction a warp; NaN is not near."""
    return tl.maximum(reach(bits, raw, scale, lowered_bound(bound)), -1.0).to(tl.int32, bitcast=True)


@triton.jit
def _publish_bound(ROW_BOUND, row, bound):
    """Let the row's other splits know what its best reach."""
    tl.atomic_max(ROW_BOUND + row, order_key(bound), sem="relaxed")


@triton.jit
def _greedy_split(source, TOKEN_OF_COLUMN, start, stop, first_token, BLOCKS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr):  # fmt: skip  # noqa: E501
    """(largest logit, its lowest token, whether all are finite or -inf) of one split."""
    best_y = tl.full((BLOCKS, 4), -float("inf"), tl.float32)
    best_token = tl.full((BLOCKS, 4), NO_TOKEN, tl.int32)
    for at in tl.range(start, stop, BLOCKS * 4, num_stages=STAGES):
        column = tile_columns(at, BLOCKS)
        y = load_tile(source, at, stop, BLOCKS, EVEN, HAS_WORK)
        if HAS_MAP:
            token = tl.load(TOKEN_OF_COLUMN + column, mask=column < stop, other=0).to(tl.int32)
            better = (y > best_y) | ((y == best_y) & (token < best_token) & (y > -float("inf")))
        else:
            token = first_token + column
            better = y > best_y
        best_token = tl.where(better, token, best_token)
        # A NaN stays: nothing is better than it, and the row is lost anyway.
        best_y = tl.maximum(best_y, y, propagate_nan=tl.PropagateNan.ALL)
    bad = tl.max(is_not_finite(best_y).to(tl.int32))
    best, token = best_of(best_y, best_token)
    return best, token, bad


@triton.jit
def _maxima_split(
    source, start, stop, inverse, BLOCKS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    HAS_WORK: tl.constexpr,
):  # fmt: skip
    """[BLOCKS, 4] largest y of each place of the split's tiles; a NaN or +inf stays."""
    best_y = tl.full((BLOCKS, 4), -float("inf"), tl.float32)
    for at in tl.range(start, stop, BLOCKS * 4, num_stages=STAGES):
        y = load_tile(source, at, stop, BLOCKS, EVEN, HAS_WORK) * inverse
        best_y = tl.maximum(best_y, y, propagate_nan=tl.PropagateNan.ALL)
    return best_y


@triton.jit
def _noisy_split(
    source, TOKEN_OF_COLUMN, ROW_BOUND, start, stop, first_token, inverse, noise_key, keeps_four,
    BLOCKS: tl.constexpr, EVEN: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr,
):  # fmt: skip
    """Four best scores and tokens (only the first counts unless keeps_four), largest y, whether not finite."""
    index, key_low, key_high = noise_key
    minus_inf = -float("inf")
    scale = inverse * LOG2_E
    s0 = tl.full((), minus_inf, tl.float64)
    s1, s2, s3 = s0, s0, s0
    t0 = tl.full((), NO_TOKEN, tl.int32)
    t1, t2, t3 = t0, t0, t0
    floor = tl.full((), minus_inf, tl.float32)
    best_y = tl.full((BLOCKS, 4), minus_inf, tl.float32)
    # The loop below is too irregular for the compiler to fetch ahead, so it does that itself.
    ahead = load_tile(source, start, stop, BLOCKS, EVEN, HAS_WORK)
    for at in tl.range(start, stop, BLOCKS * 4):
        # Warps may read different values here, so nothing but `near` may depend on them: no branch, no result.
        published = from_order_key(tl.maximum(tl.load(ROW_BOUND + source[3], volatile=True), order_key(minus_inf)))
        raw = ahead
        ahead = load_tile(source, at + BLOCKS * 4, stop, BLOCKS, EVEN, HAS_WORK)
        column = tile_columns(at, BLOCKS)
        is_open = column < stop
        best_y = tl.maximum(best_y, raw * inverse, propagate_nan=tl.PropagateNan.ALL)
        if HAS_MAP:
            token = tl.load(TOKEN_OF_COLUMN + column, mask=is_open, other=0).to(tl.int32)
            bits = bits_of_tokens(index, token, key_low, key_high)
        else:
            bits = bits_of_blocks(index, (first_token + at) // 4, key_low, key_high, BLOCKS)
        # Outside the split raw is -inf, which almost never looks near and is never taken.
        if floor == minus_inf:
            floor = _floor_of_tile(tl.where(is_open, raw * inverse + gumbel_floor(bits), minus_inf), keeps_four)
            _publish_bound(ROW_BOUND, source[3], floor)
        near = _nearness(bits, raw, scale, tl.maximum(published, floor))
        nearest = tl.max(near)
        num_left = BLOCKS * 4  # each turn closes a column; counted, so that no value whatever makes this endless
        while (nearest >= 0) & (num_left > 0):
            num_left -= 1
            # The likeliest first, so that the bound rises fast whatever the order of the logits.
            at_column = tl.min(tl.where(near == nearest, column, NO_TOKEN))
            one = load_columns(source, at_column, at_column < stop, HAS_WORK) * inverse
            one_token = first_token + at_column
            if HAS_MAP:
                one_token = tl.load(TOKEN_OF_COLUMN + at_column, mask=at_column < stop, other=0).to(tl.int32)
            noise = gumbel(bits_of_tokens(index, one_token, key_low, key_high))
            score = one.to(tl.float64) + noise.to(tl.float64)
            if score > minus_inf:
                s0, s1, s2, s3, t0, t1, t2, t3 = _insert(score, one_token, s0, s1, s2, s3, t0, t1, t2, t3)
            floor = tl.maximum(floor, tl.where(keeps_four, s3, s0).to(tl.float32))
            _publish_bound(ROW_BOUND, source[3], floor)
            is_open = is_open & (column != at_column)
            near = tl.where(is_open, _nearness(bits, raw, scale, tl.maximum(published, floor)), -1)
            nearest = tl.max(near)
    bad = tl.max(is_not_finite(best_y).to(tl.int32))
    return s0, s1, s2, s3, t0, t1, t2, t3, tl.max(best_y), bad


@triton.jit
def draw_kernel(
    LOGITS,
    WORK,
    USES_WORK,
    WORK_BAD,
    SEQUENCE,
    TOKEN_INDEX,
    TEMPERATURE,
    SEED,
    TOP_K,
    TOP_P,
    MIN_P,
    TOKEN_OF_COLUMN,
    COLUMN_OF_TOKEN,
    PART_SCORE,
    PART_TOKEN,
    PART_BEST,
    PART_BAD,
    MAXIMA,
    THRESHOLD,
    ROW_BOUND,
    CANDIDATE,
    ROW_BEST,
    STATE,
    TICKETS,
    TOKEN_IDS,
    STATUS,
    row_stride,
    num_columns,
    first_token,
    SPLITS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS_P2: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_WORK: tl.constexpr,
):
    """One split of one row; the row's last program merges.

    Args:
        LOGITS: [R, num_columns], rows row_stride apart. WORK: [R, num_columns] float32, used where USES_WORK [R] int32.
        WORK_BAD: [R] int32, whether the raw row of a working copy was not finite.
        TOKEN_OF_COLUMN: [num_columns] int64 with a map, else column c is token first_token + c.
        COLUMN_OF_TOKEN: [vocab_size] int64 with a map.
        PART_SCORE: [R, SPLITS, 4] float64. PART_TOKEN: [R, SPLITS, 4] int32. PART_BEST: [R, SPLITS] float32, largest y.
        PART_BAD: [R, SPLITS] int32. MAXIMA: [R, SPLITS, BLOCKS] float32, of rows with top-k.
        THRESHOLD: [R] uint32 out, for STATE_LIST.
        ROW_BOUND: [R] uint32, zeros: an `order_key`. TICKETS: [R] int32, zeros.
        CANDIDATE: [R, 4] int32 out. ROW_BEST: [R] float32 out. STATE: [R] int32 out.
        TOKEN_IDS: [R] int64 out, STATUS: [R] int32 out: final where STATE is STATE_DONE.
    """
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    sequence = tl.load(SEQUENCE + row)
    temperature = tl.load(TEMPERATURE + sequence)
    inverse = inverse_temperature(temperature)
    top_k, top_p, min_p = tl.load(TOP_K + sequence), tl.load(TOP_P + sequence), tl.load(MIN_P + sequence)
    is_greedy = temperature < GREEDY_BELOW
    filters = (is_greedy == 0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    uses_work = False
    if HAS_WORK:
        uses_work = tl.load(USES_WORK + row) != 0
    source = (LOGITS, WORK, COLUMN_OF_TOKEN, row, row_stride, num_columns, uses_work)

    start = split * SPLIT_COLUMNS
    stop = tl.minimum(start + SPLIT_COLUMNS, num_columns)
    part = row * SPLITS + split
    if is_greedy:
        best, token, bad = _greedy_split(
            source, TOKEN_OF_COLUMN, start, stop, first_token, BLOCKS, STAGES, EVEN, HAS_MAP, HAS_WORK
        )
        slot = tl.arange(0, 4)
        tl.store(PART_SCORE + part * 4 + slot, tl.where(slot == 0, best, -float("inf")).to(tl.float64))
        tl.store(PART_TOKEN + part * 4 + slot, tl.where(slot == 0, token, NO_TOKEN))
        tl.store(PART_BEST + part, best)
        tl.store(PART_BAD + part, bad)
    elif top_k > 0:
        maxima = _maxima_split(source, start, stop, inverse, BLOCKS, STAGES, EVEN, HAS_WORK)
        tl.store(MAXIMA + part * BLOCKS + tl.arange(0, BLOCKS), tl.max(maxima, 1))
        slot = tl.arange(0, 4)
        tl.store(PART_SCORE + part * 4 + slot, tl.full((4,), -float("inf"), tl.float64))
        tl.store(PART_TOKEN + part * 4 + slot, tl.full((4,), NO_TOKEN, tl.int32))
        tl.store(PART_BEST + part, tl.max(maxima))
        tl.store(PART_BAD + part, tl.max(is_not_finite(maxima).to(tl.int32)))
    else:
        seed = tl.load(SEED + sequence)
        noise_key = (tl.load(TOKEN_INDEX + row).to(tl.uint32), seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
        s0, s1, s2, s3, t0, t1, t2, t3, best, bad = _noisy_split(
            source, TOKEN_OF_COLUMN, ROW_BOUND, start, stop, first_token, inverse, noise_key, filters,
            BLOCKS, EVEN, HAS_MAP, HAS_WORK,
        )  # fmt: skip
        tl.store(PART_SCORE + part * 4, s0)
        tl.store(PART_SCORE + part * 4 + 1, s1)
        tl.store(PART_SCORE + part * 4 + 2, s2)
        tl.store(PART_SCORE + part * 4 + 3, s3)
        tl.store(PART_TOKEN + part * 4, t0)
        tl.store(PART_TOKEN + part * 4 + 1, t1)
        tl.store(PART_TOKEN + part * 4 + 2, t2)
        tl.store(PART_TOKEN + part * 4 + 3, t3)
        tl.store(PART_BEST + part, best)
        tl.store(PART_BAD + part, bad)
    tl.debug_barrier()
    if tl.atomic_add(TICKETS + row, 1) == SPLITS - 1:
        parts = (PART_SCORE, PART_TOKEN, PART_BEST, PART_BAD, WORK_BAD, MAXIMA)
        out = (CANDIDATE, ROW_BEST, STATE, THRESHOLD, TOKEN_IDS, STATUS)
        rules = (inverse, filters, top_k, top_p, min_p)
        merge_row(source, parts, out, rules, first_token, SPLITS, BLOCKS, SPLITS_P2, HAS_MAP, HAS_WORK)
