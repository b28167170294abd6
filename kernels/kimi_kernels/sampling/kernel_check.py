# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Second pass, for rows with top-p and no top-k: which candidate is the first that survives.

One reading of the row sums its weights, and the weights above each candidate. In float32 first: where the sums, with
room for every rounding, leave no doubt, that decides as the integers would. Rows in doubt, and those with min-p, are
summed in integers. A row whose four candidates all fall to the filters is left to `kernel_select`.
"""

import triton
import triton.language as tl

from kimi_kernels.sampling.kernel_draw import (
    STATE_CHECK,
    STATE_DONE,
    STATE_ESTIMATE,
    STATE_SELECT,
    candidate_logit,
    load_tile,
)
from kimi_kernels.sampling.kernel_noise import (
    LOG2_E,
    NO_TOKEN,
    inverse_temperature,
    min_weight,
    token_weight,
)

DOUBT = tl.constexpr(2e-4)
"""Of the whole mass: what float32 sums and dropped fractions of integer weights may be off by, twice."""
DOUBT_A_LOGIT = tl.constexpr(2.0**-20)
"""More for each unit of the largest logit: the exponent's argument is rounded at its size."""


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
    EVEN: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_WORK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One split of one row; the row's last program decides.

    Args:
        as `draw_kernel`; CANDIDATE [R, 4], ROW_BEST [R], STATE [R] from it.
        PART_MASS: [R, SPLITS, 5], int64 if EXACT, else float32: all, above each candidate.
        TICKETS: [R] int32, zeros.
    """
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    if tl.load(STATE + row) == (STATE_CHECK if EXACT else STATE_ESTIMATE):
        sequence = tl.load(SEQUENCE + row)
        inverse = inverse_temperature(tl.load(TEMPERATURE + sequence))
        top_p = tl.load(TOP_P + sequence)
        least = min_weight(tl.load(MIN_P + sequence))
        best = tl.load(ROW_BEST + row)
        uses_work = False
        if HAS_WORK:
            uses_work = tl.load(USES_WORK + row) != 0
        source = (LOGITS, WORK, COLUMN_OF_TOKEN, row, row_stride, num_columns, uses_work)
        c0, c1 = tl.load(CANDIDATE + row * 4), tl.load(CANDIDATE + row * 4 + 1)
        c2, c3 = tl.load(CANDIDATE + row * 4 + 2), tl.load(CANDIDATE + row * 4 + 3)
        y0 = candidate_logit(source, c0, first_token, inverse, HAS_MAP, HAS_WORK)
        y1 = candidate_logit(source, c1, first_token, inverse, HAS_MAP, HAS_WORK)
        y2 = candidate_logit(source, c2, first_token, inverse, HAS_MAP, HAS_WORK)
        y3 = candidate_logit(source, c3, first_token, inverse, HAS_MAP, HAS_WORK)
        start = split * SPLIT_COLUMNS
        stop = tl.minimum(start + SPLIT_COLUMNS, num_columns)
        _sum_split(
            source, PART_MASS + (row * SPLITS + split) * 5, start, stop, (inverse, best, least), (y0, y1, y2, y3),
            BLOCKS, STAGES, EVEN, HAS_WORK, EXACT,
        )  # fmt: skip
        tl.debug_barrier()
        if tl.atomic_add(TICKETS + row, 1) == SPLITS - 1:
            rules = (best, least, top_p, _sum_parts(PART_MASS, row, 0, SPLITS, SPLITS_P2))
            drawn = tl.full((), NO_TOKEN, tl.int32)
            state = tl.full((), STATE_SELECT, tl.int32)
            # From the last to the first: an earlier verdict replaces a later one, unless it is "falls".
            drawn, state = _judge(PART_MASS, row, 4, c3, y3, rules, drawn, state, SPLITS, SPLITS_P2, EXACT)
            drawn, state = _judge(PART_MASS, row, 3, c2, y2, rules, drawn, state, SPLITS, SPLITS_P2, EXACT)
            drawn, state = _judge(PART_MASS, row, 2, c1, y1, rules, drawn, state, SPLITS, SPLITS_P2, EXACT)
            drawn, state = _judge(PART_MASS, row, 1, c0, y0, rules, drawn, state, SPLITS, SPLITS_P2, EXACT)
            tl.store(TOKEN_IDS + row, drawn.to(tl.int64))
            tl.store(STATE + row, state)


@triton.jit
def _sum_split(
    source, OUT, start, stop, rules, of, BLOCKS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    HAS_WORK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write the split's mass and the masses above each candidate. rules: (inverse, best, least); of: y of each."""
    inverse, best, least = rules
    y0, y1, y2, y3 = of
    mass = tl.zeros((BLOCKS,), tl.int64 if EXACT else tl.float32)
    above_0, above_1, above_2, above_3 = mass, mass, mass, mass
    scale = inverse * LOG2_E
    offset = 0.0 - best * LOG2_E
    for at in tl.range(start, stop, BLOCKS * 4, num_stages=STAGES):
        raw = load_tile(source, at, stop, BLOCKS, EVEN, HAS_WORK)
        y = raw * inverse
        if EXACT:
            weight = token_weight(y, best)
            weight = tl.where(weight >= least, weight, 0).to(tl.int64)
        else:
            weight = tl.exp2(tl.fma(raw, scale, offset))
        mass += tl.sum(weight, 1)
        above_0 += tl.sum(tl.where(y > y0, weight, 0), 1)
        above_1 += tl.sum(tl.where(y > y1, weight, 0), 1)
        above_2 += tl.sum(tl.where(y > y2, weight, 0), 1)
        above_3 += tl.sum(tl.where(y > y3, weight, 0), 1)
    tl.store(OUT, tl.sum(mass))
    tl.store(OUT + 1, tl.sum(above_0))
    tl.store(OUT + 2, tl.sum(above_1))
    tl.store(OUT + 3, tl.sum(above_2))
    tl.store(OUT + 4, tl.sum(above_3))


@triton.jit
def _sum_parts(PART_MASS, row, which, SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr):
    split = tl.arange(0, SPLITS_P2)
    at = (row * SPLITS + split) * 5 + which
    return tl.sum(tl.load(PART_MASS + at, mask=split < SPLITS, other=0, cache_modifier=".cg"))


@triton.jit
def _judge(
    PART_MASS, row, which, token, y, rules, drawn, state,
    SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(token, state) if this candidate survives, or may; those of the later ones if it falls."""
    best, least, top_p, total = rules
    above = _sum_parts(PART_MASS, row, which, SPLITS, SPLITS_P2)
    is_token = (token != NO_TOKEN) & (y > -float("inf"))
    if EXACT:
        survives = is_token & (token_weight(y, best) >= least) & survives_top_p(above, total, top_p)
        in_doubt = survives & (survives == 0)
    else:
        room = (DOUBT + (tl.abs(best) + 64.0) * DOUBT_A_LOGIT) * total
        survives = is_token & ((y >= best) | (above < top_p * total - room))
        in_doubt = is_token & (survives == 0) & ((above >= top_p * total + room) == 0)
    drawn = tl.where(survives, token, drawn)
    state = tl.where(survives, STATE_DONE, tl.where(in_doubt, STATE_CHECK, state))
    return drawn, state


@triton.jit
def survives_top_p(above, total, top_p):
    """above, total: int64 sums of weights, exact in float64."""
    return (top_p >= 1.0) | (above == 0) | (above.to(tl.float64) < top_p.to(tl.float64) * total.to(tl.float64))
