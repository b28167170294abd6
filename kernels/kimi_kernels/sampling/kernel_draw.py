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
from triton.language.extra.cuda import gdc_wait

from kimi_kernels.sampling.kernel_merge import merge_row
from kimi_kernels.sampling.kernel_noise import (
    GREEDY_BELOW,
    NO_TOKEN,
    inverse_temperature,
    is_not_finite,
    signed_key,
)
from kimi_kernels.sampling.kernel_race import noisy_split
from kimi_kernels.sampling.kernel_rows import best_of, load_tile, tile_columns


@triton.jit
def _greedy_split(source, TOKEN_OF_COLUMN, start, stop, BLOCKS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr):  # fmt: skip  # noqa: E501
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
            token = column
            better = y > best_y
        best_token = tl.where(better, token, best_token)
        # A NaN stays: nothing is better than it, and the row is lost anyway.
        best_y = tl.maximum(best_y, y, propagate_nan=tl.PropagateNan.ALL)
    bad = tl.max(is_not_finite(best_y).to(tl.int32))
    best, token = best_of(best_y, best_token)
    return best, token, bad


@triton.jit
def _maxima_split(
    source, TILE_BEST, start, stop, inverse, BLOCKS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    HAS_WORK: tl.constexpr,
):  # fmt: skip
    """[BLOCKS, 4] largest y of each place of the split's tiles; a NaN or +inf stays."""
    best_y = tl.full((BLOCKS, 4), -float("inf"), tl.float32)
    for at in tl.range(start, stop, BLOCKS * 4, num_stages=STAGES):
        raw = load_tile(source, at, stop, BLOCKS, EVEN, HAS_WORK)
        tl.store(TILE_BEST + (at - start) // (BLOCKS * 4), tl.max(signed_key(tl.max(raw, 1))))
        best_y = tl.maximum(best_y, raw * inverse, propagate_nan=tl.PropagateNan.ALL)
    return best_y


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
    PART_SUMS,
    TILE_BEST,
    MAXIMA,
    THRESHOLD,
    ROW_BOUND,
    CANDIDATE,
    ROW_BEST,
    ROW_MASS,
    STATE,
    TICKETS,
    TOKEN_IDS,
    STATUS,
    row_stride,
    num_columns,
    SPLITS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS_P2: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_WORK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of one row; the row's last program merges.

    Args:
        LOGITS: [R, num_columns], rows row_stride apart. WORK: [R, num_columns] float32, used where USES_WORK [R] int32.
        WORK_BAD: [R] int32, whether the raw row of a working copy was not finite.
        TOKEN_OF_COLUMN: [num_columns] int64 with a map, else column c is token c.
        COLUMN_OF_TOKEN: [vocab_size] int64 with a map.
        PART_SCORE: [R, SPLITS, 4] float64. PART_TOKEN: [R, SPLITS, 4] int32. PART_BEST: [R, SPLITS] float32, largest y.
        PART_BAD: [R, SPLITS] int32. MAXIMA: [R, SPLITS, BLOCKS] float32, of rows with top-k.
        PART_SUMS: [R, SPLITS, 4] float32, of rows that filter, without top-k: the mass, the mass above a logit, both in
            units of exp(base), the y of that logit, the base.
        TILE_BEST: [R, SPLITS, tiles a split] int32, of rows that filter: `signed_key` of the largest logit.
        THRESHOLD: [R] uint32 out, for STATE_LIST.
        ROW_BOUND: [R] uint32, zeros: an `order_key`. TICKETS: [R] int32, zeros.
        CANDIDATE: [R, 4] int32 out. ROW_BEST: [R] float32 out. STATE: [R] int32 out.
        ROW_MASS: [R] float64 out, where STATE is STATE_ESTIMATE: the mass in units of exp(ROW_BEST).
        TOKEN_IDS: [R] int64 out, STATUS: [R] int32 out: final where STATE is STATE_DONE.
    """
    if PDL:
        gdc_wait()
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
    tiles = TILE_BEST + part * (SPLIT_COLUMNS // (BLOCKS * 4))
    if is_greedy:
        best, token, bad = _greedy_split(source, TOKEN_OF_COLUMN, start, stop, BLOCKS, STAGES, EVEN, HAS_MAP, HAS_WORK)
        slot = tl.arange(0, 4)
        tl.store(PART_SCORE + part * 4 + slot, tl.where(slot == 0, best, -float("inf")).to(tl.float64))
        tl.store(PART_TOKEN + part * 4 + slot, tl.where(slot == 0, token, NO_TOKEN))
        tl.store(PART_BEST + part, best)
        tl.store(PART_BAD + part, bad)
    elif top_k > 0:
        maxima = _maxima_split(source, tiles, start, stop, inverse, BLOCKS, STAGES, EVEN, HAS_WORK)
        tl.store(MAXIMA + part * BLOCKS + tl.arange(0, BLOCKS), tl.max(maxima, 1))
        slot = tl.arange(0, 4)
        tl.store(PART_SCORE + part * 4 + slot, tl.full((4,), -float("inf"), tl.float64))
        tl.store(PART_TOKEN + part * 4 + slot, tl.full((4,), NO_TOKEN, tl.int32))
        tl.store(PART_BEST + part, tl.max(maxima))
        tl.store(PART_BAD + part, tl.max(is_not_finite(maxima).to(tl.int32)))
    else:
        seed = tl.load(SEED + sequence)
        noise_key = (tl.load(TOKEN_INDEX + row).to(tl.uint32), seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
        s0, s1, s2, s3, t0, t1, t2, t3, best, bad = noisy_split(
            source, TOKEN_OF_COLUMN, ROW_BOUND, PART_SUMS + part * 4, tiles, start, stop,
            (inverse, noise_key, filters, top_p), BLOCKS, EVEN, HAS_MAP, HAS_WORK,
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
        parts = (PART_SCORE, PART_TOKEN, PART_BEST, PART_BAD, PART_SUMS, WORK_BAD, MAXIMA)
        out = (CANDIDATE, ROW_BEST, ROW_MASS, STATE, THRESHOLD, TOKEN_IDS, STATUS)
        rules = (inverse, filters, top_k, top_p, min_p)
        merge_row(source, parts, out, rules, SPLITS, BLOCKS, SPLITS_P2, HAS_MAP, HAS_WORK)
