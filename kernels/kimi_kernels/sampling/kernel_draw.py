# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""First pass over the logits: the best tokens of each row by score, before any filter.

A row is cut into splits, one program each. The program that finishes a row last merges its splits. Rows that filter
nothing are then done; the others keep their best few as candidates for `kernel_check`: whoever is best by score among
the survivors is also the first survivor in the order of scores.
"""

import triton
import triton.language as tl

from kimi_kernels.sampling.kernel_noise import (
    GREEDY_BELOW,
    NO_TOKEN,
    bits_of_blocks,
    bits_of_tokens,
    gumbel,
    inverse_temperature,
    is_not_finite,
    load_columns,
    may_reach,
)
from kimi_kernels.sampling_inputs import PLACEHOLDER_TOKEN_ID, STATUS_NOT_FINITE, STATUS_OK

CANDIDATES = tl.constexpr(4)
"""Candidates a row keeps: a top-p row needs `kernel_select` only if none of them survives."""
STATE_DONE = tl.constexpr(0)
STATE_CHECK = tl.constexpr(1)
STATE_SELECT = tl.constexpr(2)
PLACEHOLDER = tl.constexpr(PLACEHOLDER_TOKEN_ID)
OK = tl.constexpr(STATUS_OK)
NOT_FINITE = tl.constexpr(STATUS_NOT_FINITE)


@triton.jit
def _tile_columns(start, BLOCKS: tl.constexpr):
    """[BLOCKS, 4] columns from `start`."""
    return start + tl.arange(0, BLOCKS)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def _best_of(score, token):
    """Largest score and the lowest token among its equals."""
    best = tl.max(score)
    return best, tl.min(tl.where(score == best, token, NO_TOKEN))


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
def _merge_tile(score, token, keeps_four, s0, s1, s2, s3, t0, t1, t2, t3):
    """Candidates after a tile whose scores are exact."""
    best, first = _best_of(score, token)
    last_s = tl.where(keeps_four, s3, s0)
    last_t = tl.where(keeps_four, t3, t0)
    while (best > last_s) | ((best == last_s) & (first < last_t) & (best > -float("inf"))):
        s0, s1, s2, s3, t0, t1, t2, t3 = _insert(best, first, s0, s1, s2, s3, t0, t1, t2, t3)
        last_s = tl.where(keeps_four, s3, s0)
        last_t = tl.where(keeps_four, t3, t0)
        score = tl.where(token == first, -float("inf"), score)
        best, first = _best_of(score, token)
    return s0, s1, s2, s3, t0, t1, t2, t3


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
    PART_SCORE,
    PART_TOKEN,
    PART_BEST,
    PART_BAD,
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
    HAS_MAP: tl.constexpr,
    HAS_WORK: tl.constexpr,
):
    """One split of one row; the row's last program merges.

    Args:
        LOGITS: [R, num_columns], rows row_stride apart. WORK: [R, num_columns] float32, used where USES_WORK [R] int32.
        WORK_BAD: [R] int32, whether the raw row of a working copy was not finite.
        TOKEN_OF_COLUMN: [num_columns] int64 with a map, else column c is token first_token + c.
        PART_SCORE: [R, SPLITS, 4] float64. PART_TOKEN: [R, SPLITS, 4] int32. PART_BEST: [R, SPLITS] float32, largest y.
        PART_BAD: [R, SPLITS] int32. TICKETS: [R] int32, zeros.
        CANDIDATE: [R, 4] int32 out. ROW_BEST: [R] float32 out. STATE: [R] int32 out.
        TOKEN_IDS: [R] int64 out, STATUS: [R] int32 out: final where STATE is STATE_DONE.
    """
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    sequence = tl.load(SEQUENCE + row)
    temperature = tl.load(TEMPERATURE + sequence)
    inverse = inverse_temperature(temperature)
    seed = tl.load(SEED + sequence)
    key_low, key_high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    index = tl.load(TOKEN_INDEX + row).to(tl.uint32)
    top_k = tl.load(TOP_K + sequence)
    filters = (top_k > 0) | (tl.load(TOP_P + sequence) < 1.0) | (tl.load(MIN_P + sequence) > 0.0)
    is_greedy = temperature < GREEDY_BELOW
    filters = filters & (is_greedy == 0)
    uses_work = False
    if HAS_WORK:
        uses_work = tl.load(USES_WORK + row) != 0
    source = (LOGITS, WORK, TOKEN_OF_COLUMN, row, row_stride, num_columns, uses_work)

    start = split * SPLIT_COLUMNS
    stop = tl.minimum(start + SPLIT_COLUMNS, num_columns)
    minus_inf = -float("inf")
    s0 = tl.full((), minus_inf, tl.float64)
    s1, s2, s3 = s0, s0, s0
    t0 = tl.full((), NO_TOKEN, tl.int32)
    t1, t2, t3 = t0, t0, t0
    bad = tl.zeros((BLOCKS, 4), tl.int32)
    best_y = tl.full((BLOCKS, 4), minus_inf, tl.float32)
    if is_greedy:
        best_token = tl.full((BLOCKS, 4), NO_TOKEN, tl.int32)
        for at in tl.range(start, stop, BLOCKS * 4, num_stages=STAGES):
            column = _tile_columns(at, BLOCKS)
            mask = column < stop
            y = load_columns(source, column, mask, HAS_WORK)
            bad |= is_not_finite(y).to(tl.int32)
            if HAS_MAP:
                token = tl.load(TOKEN_OF_COLUMN + column, mask=mask, other=0).to(tl.int32)
                better = (y > best_y) | ((y == best_y) & (token < best_token) & (y > minus_inf))
            else:
                token = first_token + column
                better = y > best_y
            best_y = tl.where(better, y, best_y)
            best_token = tl.where(better, token, best_token)
        best, t0 = _best_of(best_y, best_token)
        s0 = best.to(tl.float64)
    else:
        for at in tl.range(start, stop, BLOCKS * 4, num_stages=STAGES):
            column = _tile_columns(at, BLOCKS)
            mask = column < stop
            raw = load_columns(source, column, mask, HAS_WORK)
            bad |= is_not_finite(raw).to(tl.int32)
            y = raw * inverse
            best_y = tl.maximum(best_y, y)
            if HAS_MAP:
                token = tl.load(TOKEN_OF_COLUMN + column, mask=mask, other=0).to(tl.int32)
                bits = bits_of_tokens(index, token, key_low, key_high)
            else:
                token = first_token + column
                bits = bits_of_blocks(index, (first_token + at) // 4, key_low, key_high, BLOCKS)
            bound = tl.where(filters, s3, s0).to(tl.float32)
            if tl.max((mask & may_reach(bits, y, bound)).to(tl.int32)) > 0:
                score = tl.where(mask, y.to(tl.float64) + gumbel(bits).to(tl.float64), minus_inf)
                s0, s1, s2, s3, t0, t1, t2, t3 = _merge_tile(score, token, filters, s0, s1, s2, s3, t0, t1, t2, t3)

    part = row * SPLITS + split
    slot = tl.arange(0, 4)
    scores = tl.where(slot == 0, s0, tl.where(slot == 1, s1, tl.where(slot == 2, s2, s3)))
    tokens = tl.where(slot == 0, t0, tl.where(slot == 1, t1, tl.where(slot == 2, t2, t3)))
    tl.store(PART_SCORE + part * 4 + slot, scores)
    tl.store(PART_TOKEN + part * 4 + slot, tokens)
    tl.store(PART_BEST + part, tl.max(best_y))
    tl.store(PART_BAD + part, tl.max(bad))
    tl.debug_barrier()
    if tl.atomic_add(TICKETS + row, 1) == SPLITS - 1:
        _merge_row(
            PART_SCORE, PART_TOKEN, PART_BEST, PART_BAD, WORK_BAD, CANDIDATE, ROW_BEST, STATE, TOKEN_IDS, STATUS,
            row, uses_work, filters, top_k, SPLITS, SPLITS_P2, HAS_WORK,
        )  # fmt: skip


@triton.jit
def _merge_row(
    PART_SCORE, PART_TOKEN, PART_BEST, PART_BAD, WORK_BAD, CANDIDATE, ROW_BEST, STATE, TOKEN_IDS, STATUS,
    row, uses_work, filters, top_k, SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr, HAS_WORK: tl.constexpr,
):  # fmt: skip
    """Candidates, status and state of a row whose splits are all written."""
    split = tl.arange(0, SPLITS_P2)
    is_split = split < SPLITS
    best_y = tl.max(tl.load(PART_BEST + row * SPLITS + split, mask=is_split, other=-float("inf"), cache_modifier=".cg"))
    bad = tl.max(tl.load(PART_BAD + row * SPLITS + split, mask=is_split, other=0, cache_modifier=".cg"))
    if HAS_WORK:
        bad |= tl.load(WORK_BAD + row, mask=uses_work, other=0)
    entry = tl.arange(0, SPLITS_P2 * 4)
    is_entry = entry < SPLITS * 4
    at = row * SPLITS * 4 + entry
    score = tl.load(PART_SCORE + at, mask=is_entry, other=-float("inf"), cache_modifier=".cg")
    token = tl.load(PART_TOKEN + at, mask=is_entry, other=NO_TOKEN, cache_modifier=".cg")
    drawn = tl.full((), NO_TOKEN, tl.int32)
    for rank in tl.static_range(4):
        best, first = _best_of(score, token)
        if rank == 0:
            drawn = first
        tl.store(CANDIDATE + row * 4 + rank, tl.where(best > -float("inf"), first, NO_TOKEN))
        score = tl.where(token == first, -float("inf"), score)
    is_ok = (bad == 0) & (best_y > -float("inf")) & (best_y < float("inf"))
    tl.store(ROW_BEST + row, best_y)
    tl.store(STATUS + row, tl.where(is_ok, OK, NOT_FINITE))
    tl.store(TOKEN_IDS + row, tl.where(is_ok, drawn, PLACEHOLDER).to(tl.int64))
    tl.store(STATE + row, tl.where(is_ok & filters, tl.where(top_k > 0, STATE_SELECT, STATE_CHECK), STATE_DONE))
