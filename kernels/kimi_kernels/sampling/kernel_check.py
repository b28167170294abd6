# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Second pass, for rows whose first candidate may fall to top-p, and for rows of which few tokens are to be listed.

top-p without top-k: which candidate is the first that survives? The draw knows the row's mass; what lies above each
candidate is summed here, from the tiles with a logit above the first candidate's: if that one falls, all below it do.
The sums are float32, which decide as integers would where they leave no doubt with room for every rounding; rows with
min-p are counted in integers. A row in doubt, or whose four candidates all fall, is left to `kernel_select`.

top-k, min-p alone: the tokens that reach the row's threshold are listed, so that `kernel_select` need not read whole
rows.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kimi_kernels.sampling.kernel_noise import (
    LOG2_E,
    NO_TOKEN,
    from_signed_key,
    inverse_temperature,
    likelihood,
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
    room_for_doubt,
    tile_columns,
)

MAX_TILES = tl.constexpr(62)
"""Tiles of a split: they are the bits of a number."""


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
    ROW_MASS,
    TILE_BEST,
    STATE,
    PART_MASS,
    THRESHOLD,
    LIST,
    NUM_LISTED,
    TICKETS,
    TOKEN_IDS,
    row_stride,
    num_columns,
    SPLITS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS_P2: tl.constexpr,
    EVEN: tl.constexpr,
    DRAW_COLUMNS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_WORK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of one row; the row's last program decides.

    Args:
        as `draw_kernel`; CANDIDATE [R, 4], ROW_BEST [R], ROW_MASS [R], TILE_BEST, STATE [R], THRESHOLD [R] from it.
        PART_MASS: [R, SPLITS, 5] float64: all, where it is counted; above each candidate. Integers in it are exact.
        DRAW_COLUMNS: columns of the draw's tiles.
        LIST: [R, LISTED] int32, in any order. NUM_LISTED: [R] int32, zeros: how many there are, also beyond LISTED.
        TICKETS: [R] int32, zeros.
    """
    if PDL:
        gdc_wait()
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
        tiles = TILE_BEST + (row * SPLITS + split) * (SPLIT_COLUMNS // DRAW_COLUMNS)
        if state == STATE_LIST:
            threshold = tl.load(THRESHOLD + row)
            wanted = _tiles_from(tiles, threshold, inverse, stop - start, SPLIT_COLUMNS, BLOCKS, DRAW_COLUMNS)
            _list_split(
                source, TOKEN_OF_COLUMN, threshold, LIST, NUM_LISTED, start, stop, inverse, wanted,
                BLOCKS, STAGES, EVEN, HAS_MAP, HAS_WORK,
            )  # fmt: skip
        else:
            rules = (inverse, tl.load(ROW_BEST + row), min_weight(tl.load(MIN_P + sequence)))
            candidates = load_candidates(source, CANDIDATE, inverse, HAS_MAP, HAS_WORK)
            place = PART_MASS + (row * SPLITS + split) * 5
            if state == STATE_COUNT:
                store_masses(
                    place, count_masses(source, start, stop, rules, candidates, BLOCKS, STAGES, EVEN, HAS_WORK)
                )
            else:
                above = order_key(candidates[4]) + 1
                wanted = _tiles_from(tiles, above, inverse, stop - start, SPLIT_COLUMNS, BLOCKS, DRAW_COLUMNS)
                store_masses(
                    place, _sum_above(source, wanted, start, stop, rules, candidates, BLOCKS, STAGES, EVEN, HAS_WORK)
                )
            tl.debug_barrier()
            if tl.atomic_add(TICKETS + row, 1) == SPLITS - 1:
                mass, a0, a1, a2, a3 = _load_masses(PART_MASS, row, SPLITS, SPLITS_P2)
                room = tl.full((), 0.0, tl.float32)
                if state == STATE_ESTIMATE:
                    mass = tl.load(ROW_MASS + row)
                    room = room_for_doubt(rules[1], mass, num_columns)
                masses = (mass, a0, a1, a2, a3)
                drawn, verdict = judge(masses, candidates, rules, tl.load(TOP_P + sequence), room)
                tl.store(TOKEN_IDS + row, drawn.to(tl.int64))
                tl.store(STATE + row, verdict)


@triton.jit
def _list_split(
    source, TOKEN_OF_COLUMN, threshold, LIST, NUM_LISTED, start, stop, inverse, wanted,
    BLOCKS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr,
):  # fmt: skip
    """Append the split's tokens that reach the threshold to the row's list; they are in the wanted tiles."""
    row = source[3]
    bits, num_wanted = wanted
    for _ in tl.range(0, num_wanted, num_stages=STAGES):
        tile, bits = _next_tile(bits)
        at = start + tile * (BLOCKS * 4)
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
def load_candidates(source, CANDIDATE, inverse, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr):
    """The four tokens of a row, best score first, then the y of each."""
    c0, c1 = tl.load(CANDIDATE + source[3] * 4), tl.load(CANDIDATE + source[3] * 4 + 1)
    c2, c3 = tl.load(CANDIDATE + source[3] * 4 + 2), tl.load(CANDIDATE + source[3] * 4 + 3)
    y0 = candidate_logit(source, c0, inverse, HAS_MAP, HAS_WORK)
    y1 = candidate_logit(source, c1, inverse, HAS_MAP, HAS_WORK)
    y2 = candidate_logit(source, c2, inverse, HAS_MAP, HAS_WORK)
    y3 = candidate_logit(source, c3, inverse, HAS_MAP, HAS_WORK)
    return c0, c1, c2, c3, y0, y1, y2, y3


@triton.jit
def count_masses(
    source, start, stop, rules, candidates,
    BLOCKS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, HAS_WORK: tl.constexpr,
):  # fmt: skip
    """Integer (mass, mass above each candidate) of columns start to stop, float64. rules: (inverse, best, least)."""
    inverse, best, least = rules
    _, _, _, _, y0, y1, y2, y3 = candidates
    mass = tl.zeros((BLOCKS,), tl.int64)
    above_0, above_1, above_2, above_3 = mass, mass, mass, mass
    for at in tl.range(start, stop, BLOCKS * 4, num_stages=STAGES):
        y = load_tile(source, at, stop, BLOCKS, EVEN, HAS_WORK) * inverse
        weight = token_weight(y, best)
        weight = tl.where(weight >= least, weight, 0).to(tl.int64)
        mass += tl.sum(weight, 1)
        above_0 += tl.sum(tl.where(y > y0, weight, 0), 1)
        above_1 += tl.sum(tl.where(y > y1, weight, 0), 1)
        above_2 += tl.sum(tl.where(y > y2, weight, 0), 1)
        above_3 += tl.sum(tl.where(y > y3, weight, 0), 1)
    return (
        tl.sum(mass).to(tl.float64),
        tl.sum(above_0).to(tl.float64),
        tl.sum(above_1).to(tl.float64),
        tl.sum(above_2).to(tl.float64),
        tl.sum(above_3).to(tl.float64),
    )


@triton.jit
def _tiles_from(
    TILE_BEST, least_key, inverse, num_columns,
    SPLIT_COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, DRAW_COLUMNS: tl.constexpr,
):  # fmt: skip
    """(int64 whose bit i says that the split's tile i holds an `order_key` of at least this, how many are set)."""
    RATIO: tl.constexpr = BLOCKS * 4 // DRAW_COLUMNS
    tile = tl.arange(0, 64)[:, None] * RATIO + tl.arange(0, RATIO)[None, :]
    is_tile = (tile < SPLIT_COLUMNS // DRAW_COLUMNS) & (tile * DRAW_COLUMNS < num_columns)
    key = tl.load(TILE_BEST + tile, mask=is_tile, other=0, cache_modifier=".cg")
    is_wanted = tl.max((is_tile & (order_key(from_signed_key(key) * inverse) >= least_key)).to(tl.int64), 1)
    return tl.sum(is_wanted << tl.arange(0, 64).to(tl.int64)), tl.sum(is_wanted.to(tl.int32))


@triton.jit
def _next_tile(bits):
    """(place of the lowest bit, the others)."""
    lowest = bits & (0 - bits)
    # The exponent of a power of two is the place of its bit.
    return (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, bits ^ lowest


@triton.jit
def _sum_above(
    source, wanted, start, stop, rules, candidates,
    BLOCKS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, HAS_WORK: tl.constexpr,
):  # fmt: skip
    """(0, mass above each candidate) in float32, from the wanted tiles: (their bits, how many)."""
    inverse, best, _ = rules
    _, _, _, _, y0, y1, y2, y3 = candidates
    bits, num_wanted = wanted
    above_0 = tl.zeros((BLOCKS,), tl.float32)
    above_1, above_2, above_3 = above_0, above_0, above_0
    scale = inverse * LOG2_E
    for _ in tl.range(0, num_wanted, num_stages=STAGES):
        tile, bits = _next_tile(bits)
        raw = load_tile(source, start + tile * (BLOCKS * 4), stop, BLOCKS, EVEN, HAS_WORK)
        y = raw * inverse
        weight = likelihood(raw, scale, best)
        above_0 += tl.sum(tl.where(y > y0, weight, 0.0), 1)
        above_1 += tl.sum(tl.where(y > y1, weight, 0.0), 1)
        above_2 += tl.sum(tl.where(y > y2, weight, 0.0), 1)
        above_3 += tl.sum(tl.where(y > y3, weight, 0.0), 1)
    return (
        tl.full((), 0.0, tl.float64),
        tl.sum(above_0).to(tl.float64),
        tl.sum(above_1).to(tl.float64),
        tl.sum(above_2).to(tl.float64),
        tl.sum(above_3).to(tl.float64),
    )


@triton.jit
def store_masses(place, masses):
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
