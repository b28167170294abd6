# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Second pass, for rows that filter by mass or by rank.

top-p without top-k: which candidate is the first that survives? One reading of the row sums its weights, and the
weights above each candidate: in float32, which decides as integers would where it leaves no doubt with room for every
rounding; in integers for rows with min-p. A row in doubt, or whose four candidates all fall, is left to
`kernel_select`.

top-k: the tokens that reach the row's threshold are listed, so that `kernel_select` need not read whole rows.
"""

import triton
import triton.language as tl

from kimi_kernels.sampling.kernel_noise import (
    LOG2_E,
    NO_TOKEN,
    inverse_temperature,
    min_weight,
    order_key,
    token_weight,
)
from kimi_kernels.sampling.kernel_rows import (
    LISTED,
    STATE_COUNT,
    STATE_DONE,
    STATE_DOUBT,
    STATE_ESTIMATE,
    STATE_LIST,
    STATE_SELECT,
    candidate_logit,
    load_tile,
    tile_columns,
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
    TOKEN_OF_COLUMN,
    COLUMN_OF_TOKEN,
    CANDIDATE,
    ROW_BEST,
    STATE,
    PART_MASS,
    THRESHOLD,
    LIST,
    NUM_LISTED,
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
):
    """One split of one row; the row's last program decides.

    Args:
        as `draw_kernel`; CANDIDATE [R, 4], ROW_BEST [R], STATE [R], THRESHOLD [R] from it.
        PART_MASS: [R, SPLITS, 5] float64: all, above each candidate; integers in it are exact.
        LIST: [R, LISTED] int32, in any order. NUM_LISTED: [R] int32, zeros: how many there are, also beyond LISTED.
        TICKETS: [R] int32, zeros.
    """
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    state = tl.load(STATE + row)
    start = split * SPLIT_COLUMNS
    stop = tl.minimum(start + SPLIT_COLUMNS, num_columns)
    if (state == STATE_ESTIMATE) | (state == STATE_COUNT) | (state == STATE_LIST):
        sequence = tl.load(SEQUENCE + row)
        inverse = inverse_temperature(tl.load(TEMPERATURE + sequence))
        uses_work = False
        if HAS_WORK:
            uses_work = tl.load(USES_WORK + row) != 0
        source = (LOGITS, WORK, COLUMN_OF_TOKEN, row, row_stride, num_columns, uses_work)
        if state == STATE_LIST:
            _list_split(
                source, TOKEN_OF_COLUMN, tl.load(THRESHOLD + row), LIST, NUM_LISTED, start, stop, inverse,
                BLOCKS, STAGES, EVEN, HAS_MAP, HAS_WORK,
            )  # fmt: skip
        else:
            rules = (inverse, tl.load(ROW_BEST + row), min_weight(tl.load(MIN_P + sequence)))
            candidates = load_candidates(source, CANDIDATE, first_token, inverse, HAS_MAP, HAS_WORK)
            place = PART_MASS + (row * SPLITS + split) * 5
            if state == STATE_COUNT:
                masses = sum_masses(source, start, stop, rules, candidates, BLOCKS, STAGES, EVEN, HAS_WORK, True)
                _store_masses(place, masses)
            else:
                masses = sum_masses(source, start, stop, rules, candidates, BLOCKS, STAGES, EVEN, HAS_WORK, False)
                _store_masses(place, masses)
            tl.debug_barrier()
            if tl.atomic_add(TICKETS + row, 1) == SPLITS - 1:
                masses = _load_masses(PART_MASS, row, SPLITS, SPLITS_P2)
                room = tl.where(state == STATE_COUNT, 0.0, DOUBT + (tl.abs(rules[1]) + 64.0) * DOUBT_A_LOGIT)
                drawn, verdict = judge(masses, candidates, rules, tl.load(TOP_P + sequence), room)
                tl.store(TOKEN_IDS + row, drawn.to(tl.int64))
                tl.store(STATE + row, verdict)


@triton.jit
def _list_split(
    source, TOKEN_OF_COLUMN, threshold, LIST, NUM_LISTED, start, stop, inverse,
    BLOCKS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr,
):  # fmt: skip
    """Append the split's tokens that reach the threshold to the row's list."""
    row = source[3]
    for at in tl.range(start, stop, BLOCKS * 4, num_stages=STAGES):
        column = tile_columns(at, BLOCKS)
        y = load_tile(source, at, stop, BLOCKS, EVEN, HAS_WORK) * inverse
        is_listed = ((y > -float("inf")) & (order_key(y) >= threshold)).to(tl.int32)
        count = tl.sum(is_listed)
        if count > 0:
            first = tl.atomic_add(NUM_LISTED + row, count, sem="relaxed")
            token = column
            if HAS_MAP:
                token = tl.load(TOKEN_OF_COLUMN + column, mask=is_listed > 0, other=0).to(tl.int32)
            flat = tl.reshape(is_listed, (BLOCKS * 4,))
            place = first + tl.cumsum(flat, 0) - 1
            keep = (flat > 0) & (place < LISTED)
            tl.store(LIST + row.to(tl.int64) * LISTED + place, tl.reshape(token, (BLOCKS * 4,)), mask=keep)


@triton.jit
def load_candidates(source, CANDIDATE, first_token, inverse, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr):
    """The four tokens of a row, best score first, then the y of each."""
    c0, c1 = tl.load(CANDIDATE + source[3] * 4), tl.load(CANDIDATE + source[3] * 4 + 1)
    c2, c3 = tl.load(CANDIDATE + source[3] * 4 + 2), tl.load(CANDIDATE + source[3] * 4 + 3)
    y0 = candidate_logit(source, c0, first_token, inverse, HAS_MAP, HAS_WORK)
    y1 = candidate_logit(source, c1, first_token, inverse, HAS_MAP, HAS_WORK)
    y2 = candidate_logit(source, c2, first_token, inverse, HAS_MAP, HAS_WORK)
    y3 = candidate_logit(source, c3, first_token, inverse, HAS_MAP, HAS_WORK)
    return c0, c1, c2, c3, y0, y1, y2, y3


@triton.jit
def sum_masses(
    source, start, stop, rules, candidates,
    BLOCKS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, HAS_WORK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(mass, mass above each candidate) of columns start to stop, float64. rules: (inverse, best, least)."""
    inverse, best, least = rules
    _, _, _, _, y0, y1, y2, y3 = candidates
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
    masses = (
        tl.sum(mass).to(tl.float64),
        tl.sum(above_0).to(tl.float64),
        tl.sum(above_1).to(tl.float64),
        tl.sum(above_2).to(tl.float64),
        tl.sum(above_3).to(tl.float64),
    )
    return masses


@triton.jit
def _store_masses(place, masses):
    for which in tl.static_range(5):
        tl.store(place + which, masses[which])


@triton.jit
def _load_masses(PART_MASS, row, SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr):
    """Sums over the splits, always in the same order."""
    split = tl.arange(0, SPLITS_P2)
    at = PART_MASS + (row * SPLITS + split) * 5
    mask = split < SPLITS
    return (
        tl.sum(tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")),
        tl.sum(tl.load(at + 1, mask=mask, other=0.0, cache_modifier=".cg")),
        tl.sum(tl.load(at + 2, mask=mask, other=0.0, cache_modifier=".cg")),
        tl.sum(tl.load(at + 3, mask=mask, other=0.0, cache_modifier=".cg")),
        tl.sum(tl.load(at + 4, mask=mask, other=0.0, cache_modifier=".cg")),
    )


@triton.jit
def judge(masses, candidates, rules, top_p, room):
    """(token, state): the first candidate that survives, whether one before it is in doubt, or that all fall.

    room: share of the mass by which the sums may be off; 0 for integers.
    """
    drawn = tl.full((), NO_TOKEN, tl.int32)
    state = tl.full((), STATE_SELECT, tl.int32)
    limit = top_p.to(tl.float64) * masses[0]
    # From the last to the first: an earlier verdict replaces a later one, unless it is "falls".
    for back in tl.static_range(4):
        token, y, above = candidates[3 - back], candidates[7 - back], masses[4 - back]
        may_survive = (token != NO_TOKEN) & (y > -float("inf")) & (token_weight(y, rules[1]) >= rules[2])
        survives = may_survive & ((y >= rules[1]) | (above < limit - room * masses[0]))
        falls = (may_survive == 0) | ((y < rules[1]) & (above >= limit + room * masses[0]))
        drawn = tl.where(survives, token, drawn)
        state = tl.where(survives, STATE_DONE, tl.where(falls, state, STATE_DOUBT))
    return drawn, state
