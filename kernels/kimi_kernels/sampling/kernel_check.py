# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Second pass, for rows with top-p or min-p and no top-k: which candidate is the first that survives.

One reading of the row sums its weights, and the weights above each candidate, in integers. A row whose four
candidates all fall to the filters is left to `kernel_select`.
"""

import triton
import triton.language as tl

from kimi_kernels.sampling.kernel_draw import STATE_CHECK, STATE_DONE, STATE_SELECT, _tile_columns
from kimi_kernels.sampling.kernel_noise import (
    NO_TOKEN,
    inverse_temperature,
    load_columns,
    load_tokens,
    min_weight,
    token_weight,
)


@triton.jit
def _candidate(source, CANDIDATE, rank, first_token, inverse, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr):
    """(token, y) of a row's candidate; y is -inf for NO_TOKEN."""
    token = tl.load(CANDIDATE + source[3] * 4 + rank)
    is_token = token != NO_TOKEN
    if HAS_MAP:
        return token, inverse * load_tokens(source, token, is_token, HAS_MAP, HAS_WORK)
    return token, inverse * load_columns(source, token - first_token, is_token, HAS_WORK)


@triton.jit
def check_kernel(
    LOGITS,
    WORK,
    USES_WORK,
    SEQUENCE,
    TEMPERATURE,
    TOP_P,
    MIN_P,
    COLUMN_OF_TOKEN,
    CANDIDATE,
    ROW_BEST,
    STATE,
    PART_MASS,
    TICKETS,
    TOKEN_IDS,
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
    """One split of one row; the row's last program decides.

    Args:
        as `draw_kernel`; CANDIDATE [R, 4], ROW_BEST [R], STATE [R] from it.
        COLUMN_OF_TOKEN: [vocab_size] int64 with a map. PART_MASS: [R, SPLITS, 5] int64: all, above each candidate.
        TICKETS: [R] int32, zeros.
    """
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    if tl.load(STATE + row) == STATE_CHECK:
        sequence = tl.load(SEQUENCE + row)
        inverse = inverse_temperature(tl.load(TEMPERATURE + sequence))
        top_p = tl.load(TOP_P + sequence)
        least = min_weight(tl.load(MIN_P + sequence))
        best = tl.load(ROW_BEST + row)
        uses_work = False
        if HAS_WORK:
            uses_work = tl.load(USES_WORK + row) != 0
        source = (LOGITS, WORK, COLUMN_OF_TOKEN, row, row_stride, num_columns, uses_work)
        c0, y0 = _candidate(source, CANDIDATE, 0, first_token, inverse, HAS_MAP, HAS_WORK)
        c1, y1 = _candidate(source, CANDIDATE, 1, first_token, inverse, HAS_MAP, HAS_WORK)
        c2, y2 = _candidate(source, CANDIDATE, 2, first_token, inverse, HAS_MAP, HAS_WORK)
        c3, y3 = _candidate(source, CANDIDATE, 3, first_token, inverse, HAS_MAP, HAS_WORK)
        mass = tl.zeros((BLOCKS,), tl.int64)
        above_0 = tl.zeros((BLOCKS,), tl.int64)
        above_1 = tl.zeros((BLOCKS,), tl.int64)
        above_2 = tl.zeros((BLOCKS,), tl.int64)
        above_3 = tl.zeros((BLOCKS,), tl.int64)
        start = split * SPLIT_COLUMNS
        stop = tl.minimum(start + SPLIT_COLUMNS, num_columns)
        for at in tl.range(start, stop, BLOCKS * 4, num_stages=STAGES):
            column = _tile_columns(at, BLOCKS)
            y = inverse * load_columns(source, column, column < stop, HAS_WORK)
            weight = token_weight(y, best)
            weight = tl.where(weight >= least, weight, 0).to(tl.int64)
            mass += tl.sum(weight, 1)
            above_0 += tl.sum(tl.where(y > y0, weight, 0), 1)
            above_1 += tl.sum(tl.where(y > y1, weight, 0), 1)
            above_2 += tl.sum(tl.where(y > y2, weight, 0), 1)
            above_3 += tl.sum(tl.where(y > y3, weight, 0), 1)
        part = PART_MASS + (row * SPLITS + split) * 5
        tl.store(part, tl.sum(mass))
        tl.store(part + 1, tl.sum(above_0))
        tl.store(part + 2, tl.sum(above_1))
        tl.store(part + 3, tl.sum(above_2))
        tl.store(part + 4, tl.sum(above_3))
        tl.debug_barrier()
        if tl.atomic_add(TICKETS + row, 1) == SPLITS - 1:
            total = _sum_parts(PART_MASS, row, 0, SPLITS, SPLITS_P2)
            drawn = tl.full((), NO_TOKEN, tl.int32)
            drawn = _first_survivor(PART_MASS, row, 4, c3, y3, best, least, top_p, total, drawn, SPLITS, SPLITS_P2)
            drawn = _first_survivor(PART_MASS, row, 3, c2, y2, best, least, top_p, total, drawn, SPLITS, SPLITS_P2)
            drawn = _first_survivor(PART_MASS, row, 2, c1, y1, best, least, top_p, total, drawn, SPLITS, SPLITS_P2)
            drawn = _first_survivor(PART_MASS, row, 1, c0, y0, best, least, top_p, total, drawn, SPLITS, SPLITS_P2)
            tl.store(TOKEN_IDS + row, drawn.to(tl.int64))
            tl.store(STATE + row, tl.where(drawn == NO_TOKEN, STATE_SELECT, STATE_DONE))


@triton.jit
def _sum_parts(PART_MASS, row, which, SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr):
    split = tl.arange(0, SPLITS_P2)
    at = (row * SPLITS + split) * 5 + which
    return tl.sum(tl.load(PART_MASS + at, mask=split < SPLITS, other=0, cache_modifier=".cg"))


@triton.jit
def _first_survivor(
    PART_MASS, row, which, token, y, best, least, top_p, total, drawn, SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr
):
    """This candidate if it survives, else the one found among the later ones."""
    above = _sum_parts(PART_MASS, row, which, SPLITS, SPLITS_P2)
    survives = (token != NO_TOKEN) & (y > -float("inf")) & (token_weight(y, best) >= least)
    survives = survives & survives_top_p(above, total, top_p)
    return tl.where(survives, token, drawn)


@triton.jit
def survives_top_p(above, total, top_p):
    """above, total: int64 sums of weights, exact in float64."""
    return (top_p >= 1.0) | (above == 0) | (above.to(tl.float64) < top_p.to(tl.float64) * total.to(tl.float64))
