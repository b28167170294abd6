# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The end of the first pass: one program merges a row's splits and says what is left to do for the row."""

import triton
import triton.language as tl

from kimi_kernels.sampling.kernel_noise import LOG2_E, NO_TOKEN, min_weight, order_key, token_weight
from kimi_kernels.sampling.kernel_rows import (
    LISTED,
    NEVER,
    NO_TOKEN_LEFT,
    NOT_FINITE,
    OK,
    PLACEHOLDER,
    STATE_COUNT,
    STATE_DONE,
    STATE_ESTIMATE,
    STATE_LIST,
    STATE_SELECT,
    best_of,
    candidate_logit,
    next_digit,
    room_for_doubt,
)

MIN_P_MARGIN = tl.constexpr(1e-3)
"""The most that the logit at which min-p cuts is off by, and so much more for each unit of the largest logit."""
MIN_P_MARGIN_A_LOGIT = tl.constexpr(2.0**-20)


@triton.jit
def _list_threshold(ROW_MAXIMA, top_k, NUM_MAXIMA: tl.constexpr, BLOCK: tl.constexpr):
    """A key that at least k tokens of the row reach, and hardly more; NEVER if k is too large for a list.

    At least k of the row's largest y by place reach the k-th of them; its key is cut to 16 bits.
    """
    key_k = tl.full((), 0, tl.uint32)
    left = top_k
    num_finite = tl.full((), 0, tl.int32)
    for digit in tl.static_range(2):
        shift = 24 - 8 * digit
        counts = tl.zeros((256,), tl.int32)
        for at in tl.range(0, NUM_MAXIMA, BLOCK):
            entry = at + tl.arange(0, BLOCK)
            y = tl.load(ROW_MAXIMA + entry, mask=entry < NUM_MAXIMA, other=-float("inf"), cache_modifier=".cg")
            key = order_key(y)
            counted = y > -float("inf")
            if digit > 0:
                counted = counted & ((key >> (shift + 8)) == (key_k >> (shift + 8)))
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=counted)
        if digit == 0:
            num_finite = tl.sum(counts)
        key_k, left = next_digit(key_k, left, counts, shift)
    return tl.where((top_k <= num_finite) & (top_k <= LISTED), key_k, NEVER)


@triton.jit
def _with_min_p(threshold, best_y, min_p):
    """The threshold of a list that holds all that min-p leaves, or enough of it for top-k.

    min-p ranks by weight, whose order may differ from that of y by a unit. So a list for top-k is good only if it ends
    clearly above where min-p cuts; else it must hold all that min-p may leave.
    """
    margin = MIN_P_MARGIN + tl.abs(best_y) * MIN_P_MARGIN_A_LOGIT
    cut = best_y + tl.log(min_p)
    is_clear = (threshold != NEVER) & (threshold > order_key(cut + margin))
    return tl.where(is_clear, threshold, order_key(cut - margin))


@triton.jit
def _survives_for_certain(
    PART_SUMS, row, num_columns, first_y, best_y, top_p, is_first, SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr
):
    """(whether the best candidate survives top-p whatever the exact sums are, the mass in units of exp(best_y))."""
    split = tl.arange(0, SPLITS_P2)
    is_split = split < SPLITS
    at = PART_SUMS + (row * SPLITS + split) * 4
    mass = tl.load(at, mask=is_split, other=0.0, cache_modifier=".cg")
    above = tl.load(at + 1, mask=is_split, other=0.0, cache_modifier=".cg")
    high = tl.load(at + 2, mask=is_split, other=0.0, cache_modifier=".cg")
    base = tl.load(at + 3, mask=is_split, other=-float("inf"), cache_modifier=".cg")
    unit = tl.where(mass > 0.0, tl.exp2((base - best_y) * LOG2_E), 0.0).to(tl.float64)
    total = tl.sum(mass.to(tl.float64) * unit)
    # At most this lies above the candidate: all but itself, or what lies above logits below it.
    own = tl.exp2((first_y - best_y) * LOG2_E).to(tl.float64)
    most = tl.sum(tl.where(first_y >= high, above, mass).to(tl.float64) * unit)
    most = tl.minimum(most, total - own)
    is_certain = (first_y >= best_y) | (
        most < (top_p - room_for_doubt(best_y, total, num_columns)).to(tl.float64) * total
    )
    return is_first & is_certain, total


@triton.jit
def merge_row(
    source, parts, out, rules,
    SPLITS: tl.constexpr, BLOCKS: tl.constexpr, SPLITS_P2: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr,
):  # fmt: skip
    """Candidates, status and state of a row whose splits are all written."""
    PART_SCORE, PART_TOKEN, PART_BEST, PART_BAD, PART_SUMS, WORK_BAD, MAXIMA = parts
    CANDIDATE, ROW_BEST, ROW_MASS, STATE, THRESHOLD, TOKEN_IDS, STATUS = out
    inverse, filters, top_k, top_p, min_p = rules
    row = source[3]
    split = tl.arange(0, SPLITS_P2)
    is_split = split < SPLITS
    best_y = tl.max(tl.load(PART_BEST + row * SPLITS + split, mask=is_split, other=-float("inf"), cache_modifier=".cg"))
    bad = tl.max(tl.load(PART_BAD + row * SPLITS + split, mask=is_split, other=0, cache_modifier=".cg"))
    if HAS_WORK:
        bad |= tl.load(WORK_BAD + row, mask=source[6], other=0)
    entry = tl.arange(0, SPLITS_P2 * 4)
    is_entry = entry < SPLITS * 4
    at = row * SPLITS * 4 + entry
    score = tl.load(PART_SCORE + at, mask=is_entry, other=-float("inf"), cache_modifier=".cg")
    token = tl.load(PART_TOKEN + at, mask=is_entry, other=NO_TOKEN, cache_modifier=".cg")
    is_ok = (bad == 0) & (best_y > -float("inf")) & (best_y < float("inf"))
    only_min_p = filters & (top_k <= 0) & (top_p >= 1.0)
    drawn = tl.full((), NO_TOKEN, tl.int32)
    first_candidate = drawn
    for rank in tl.static_range(4):
        best, first = best_of(score, token)
        first = tl.where(best > -float("inf"), first, NO_TOKEN)
        tl.store(CANDIDATE + row * 4 + rank, first)
        score = tl.where(token == first, -float("inf"), score)
        survives = first != NO_TOKEN
        if rank == 0:
            first_candidate = first
        if only_min_p & is_ok:
            y = candidate_logit(source, first, inverse, HAS_MAP, HAS_WORK)
            survives = survives & (token_weight(y, best_y) >= min_weight(min_p))
        drawn = tl.where(survives & (drawn == NO_TOKEN), first, drawn)
    next_state = tl.full((), STATE_COUNT, tl.int32)
    if filters & is_ok & (top_k <= 0) & (min_p <= 0.0):
        y = candidate_logit(source, first_candidate, inverse, HAS_MAP, HAS_WORK)
        is_certain, mass = _survives_for_certain(
            PART_SUMS, row, source[5], y, best_y, top_p, first_candidate != NO_TOKEN, SPLITS, SPLITS_P2
        )
        is_sum = (mass > 0.0) & (mass < float("inf"))
        next_state = tl.where(is_certain, STATE_DONE, tl.where(is_sum, STATE_ESTIMATE, STATE_COUNT))
        tl.store(ROW_MASS + row, mass)
    if (only_min_p & (drawn == NO_TOKEN) | (top_k > 0)) & is_ok:
        threshold = tl.full((), NEVER, tl.uint32)
        if top_k > 0:
            threshold = _list_threshold(MAXIMA + row * SPLITS * BLOCKS, top_k, SPLITS * BLOCKS, BLOCKS)
        if min_p > 0.0:
            threshold = _with_min_p(threshold, best_y, min_p)
        tl.store(THRESHOLD + row, threshold)
        next_state = tl.where(threshold == NEVER, STATE_SELECT, STATE_LIST)
    elif only_min_p:
        next_state = tl.full((), STATE_DONE, tl.int32)
    tl.store(ROW_BEST + row, best_y)
    has_none_left = (bad == 0) & (best_y == -float("inf"))
    tl.store(STATUS + row, tl.where(is_ok, OK, tl.where(has_none_left, NO_TOKEN_LEFT, NOT_FINITE)))
    tl.store(TOKEN_IDS + row, tl.where(is_ok, drawn, PLACEHOLDER).to(tl.int64))
    tl.store(STATE + row, tl.where(is_ok & filters, next_state, STATE_DONE))
