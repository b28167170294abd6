# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The general way, for rows with top-k and those whose candidates all fell.

One program a row. A row in doubt first counts its candidates' masses in integers. Where all candidates fell to top-p,
the survivors lie above them: the best four of those are the next candidates (`kernel_redraw`). Else thresholds are
found, in the list that `kernel_check` made of the likely tokens (`kernel_few` if it is short) or among all tokens, and
the best above them is drawn. top-k: radix selection of the k-th largest y, a byte at a time, and bisection for the last
id among its equals. top-p then: bisection over the keys of y, by integer mass.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kimi_kernels.sampling.kernel_check import count_masses, judge, load_candidates
from kimi_kernels.sampling.kernel_few import draw_of_few
from kimi_kernels.sampling.kernel_noise import (
    NO_TOKEN,
    bits_of_tokens,
    gumbel,
    inverse_temperature,
    load_tokens,
    min_weight,
    order_key,
    token_weight,
)
from kimi_kernels.sampling.kernel_redraw import redraw
from kimi_kernels.sampling.kernel_rows import (
    LISTED,
    STATE_DONE,
    STATE_DOUBT,
    STATE_LIST,
    STATE_SELECT,
    best_of,
    next_digit,
)

LEAST_WITH_WEIGHT = tl.constexpr(-23.0)
"""y - best below which the weight is 0 for certain, so that top-p cannot keep the token."""


@triton.jit
def _load_survivors(
    source, entries, at, rules, cut, BLOCK: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr
):
    """A tile of all tokens or of the list: (token, y, key, which min-p and top-k left).

    entries: (LIST, how many, whether they are listed). cut: (key, token) of the last that top-k keeps.
    """
    LIST, num_entries, is_listed = entries
    inverse, best, least = rules
    key_k, cut_token = cut
    entry = at + tl.arange(0, BLOCK)
    mask = entry < num_entries
    listed = tl.load(LIST + source[3].to(tl.int64) * LISTED + entry, mask=mask & is_listed, other=0)
    token = tl.where(is_listed, listed, entry)
    y = inverse * load_tokens(source, token, mask, HAS_MAP, HAS_WORK)
    key = order_key(y)
    alive = (y > -float("inf")) & (token_weight(y, best) >= least)
    return token, y, key, alive & ((key > key_k) | ((key == key_k) & (token <= cut_token)))


@triton.jit
def _kth_key(source, entries, rules, top_k, BLOCK: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr):
    """(key of the k-th most likely token, how many of that key top-k keeps): a byte of the key at a time."""
    everything = (tl.full((), 0, tl.uint32), tl.full((), NO_TOKEN, tl.int32))
    key_k = tl.full((), 0, tl.uint32)
    left = top_k
    for digit in tl.static_range(4):
        shift = 24 - 8 * digit
        counts = tl.zeros((256,), tl.int32)
        for at in tl.range(0, entries[1], BLOCK):
            _, _, key, alive = _load_survivors(source, entries, at, rules, everything, BLOCK, HAS_MAP, HAS_WORK)
            if digit > 0:
                alive = alive & ((key >> (shift + 8)) == (key_k >> (shift + 8)))
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=alive)
        left = tl.minimum(left, tl.sum(counts))
        key_k, left = next_digit(key_k, left, counts, shift)
    return key_k, left


@triton.jit
def _count_equal(
    source, entries, rules, key_k, last, BLOCK: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr
):
    """Tokens of key `key_k` with ids up to `last`."""
    count = tl.full((), 0, tl.int32)
    for at in tl.range(0, entries[1], BLOCK):
        _, _, key, alive = _load_survivors(source, entries, at, rules, (key_k, last), BLOCK, HAS_MAP, HAS_WORK)
        count += tl.sum((alive & (key == key_k)).to(tl.int32))
    return count


@triton.jit
def _last_equal(
    source, entries, rules, key_k, num_equal, num_tokens,
    BLOCK: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr,
):  # fmt: skip
    """The id up to which there are `num_equal` tokens of key `key_k`."""
    low = tl.full((), 0, tl.int32)
    high = low + num_tokens - 1
    if _count_equal(source, entries, rules, key_k, high, BLOCK, HAS_MAP, HAS_WORK) == num_equal:
        low = high
    while low < high:
        middle = (low + high) // 2
        is_enough = _count_equal(source, entries, rules, key_k, middle, BLOCK, HAS_MAP, HAS_WORK) >= num_equal
        low = tl.where(is_enough, low, middle + 1)
        high = tl.where(is_enough, middle, high)
    return low


@triton.jit
def _mass_above(
    source, entries, rules, cut, key_above, BLOCK: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr
):
    """Weights of survivors whose key is above `key_above`, int64; every key is above 0."""
    mass = tl.zeros((BLOCK,), tl.int64)
    for at in tl.range(0, entries[1], BLOCK):
        _, y, key, alive = _load_survivors(source, entries, at, rules, cut, BLOCK, HAS_MAP, HAS_WORK)
        mass += tl.where(alive & (key > key_above), token_weight(y, rules[1]), 0).to(tl.int64)
    return tl.sum(mass)


@triton.jit
def _top_p_key(source, entries, rules, cut, top_p, BLOCK: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr):
    """The smallest key with less than top_p of the mass above it, by bisection."""
    low = order_key(rules[1] + LEAST_WITH_WEIGHT).to(tl.int64)
    high = order_key(rules[1]).to(tl.int64)
    total = _mass_above(source, entries, rules, cut, tl.full((), 0, tl.uint32), BLOCK, HAS_MAP, HAS_WORK)
    while low < high:
        middle = (low + high) // 2
        above = _mass_above(source, entries, rules, cut, middle.to(tl.uint32), BLOCK, HAS_MAP, HAS_WORK)
        # Sums of weights are exact in float64.
        reaches = (above == 0) | (above.to(tl.float64) < top_p.to(tl.float64) * total.to(tl.float64))
        low = tl.where(reaches, low, middle + 1)
        high = tl.where(reaches, middle, high)
    return low.to(tl.uint32)


@triton.jit
def select_kernel(
    LOGITS,
    WORK,
    USES_WORK,
    SEQUENCE,
    TOKEN_INDEX,
    TEMPERATURE,
    SEED,
    TOP_K,
    TOP_P,
    MIN_P,
    COLUMN_OF_TOKEN,
    CANDIDATE,
    ROW_BEST,
    STATE,
    LIST,
    NUM_LISTED,
    TOKEN_IDS,
    row_stride,
    num_columns,
    num_tokens,
    BLOCK: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_WORK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row.

    Args:
        as `draw_kernel` and `check_kernel`; num_tokens: size of the target's vocabulary.
    """
    if PDL:
        gdc_wait()
    row = tl.program_id(0)
    state = tl.load(STATE + row)
    if (state == STATE_SELECT) | (state == STATE_LIST) | (state == STATE_DOUBT):
        sequence = tl.load(SEQUENCE + row)
        inverse = inverse_temperature(tl.load(TEMPERATURE + sequence))
        top_k = tl.load(TOP_K + sequence)
        top_p = tl.load(TOP_P + sequence)
        uses_work = False
        if HAS_WORK:
            uses_work = tl.load(USES_WORK + row) != 0
        source = (LOGITS, WORK, COLUMN_OF_TOKEN, row, row_stride, num_columns, uses_work)
        rules = (inverse, tl.load(ROW_BEST + row), min_weight(tl.load(MIN_P + sequence)))
        seed = tl.load(SEED + sequence)
        noise_key = (tl.load(TOKEN_INDEX + row).to(tl.uint32), seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
        drawn = tl.full((), NO_TOKEN, tl.int32)
        if (top_k <= 0) & (top_p < 1.0):
            candidates = load_candidates(source, CANDIDATE, inverse, HAS_MAP, HAS_WORK)
            if state == STATE_DOUBT:
                masses = count_masses(source, 0, num_columns, rules, candidates, BLOCK // 4, 2, False, HAS_WORK)
                drawn, _ = judge(masses, candidates, rules, top_p, 0.0)
            if drawn == NO_TOKEN:
                drawn = redraw(source, candidates, rules, noise_key, top_p, num_tokens, BLOCK, HAS_MAP, HAS_WORK)
        else:
            num_listed = tl.load(NUM_LISTED + row)
            is_listed = (state == STATE_LIST) & (num_listed <= LISTED)
            entries = (LIST, tl.where(is_listed, num_listed, num_tokens), is_listed)
            all_kept = (tl.full((), 0, tl.uint32), tl.full((), NO_TOKEN, tl.int32))
            if is_listed & (num_listed <= BLOCK):
                tile = _load_survivors(source, entries, 0, rules, all_kept, BLOCK, HAS_MAP, HAS_WORK)
                drawn = draw_of_few(tile, rules[1], (top_k, top_p), noise_key, num_tokens)
            else:
                drawn = _draw_of_many(
                    source, entries, rules, (top_k, top_p), noise_key, num_tokens, BLOCK, HAS_MAP, HAS_WORK
                )
        tl.store(TOKEN_IDS + row, drawn.to(tl.int64))
        tl.store(STATE + row, STATE_DONE)


@triton.jit
def _draw_of_many(
    source, entries, rules, keeps, noise_key, num_tokens,
    BLOCK: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr,
):  # fmt: skip
    """Draw from entries that do not fit one tile. keeps: (top_k, top_p)."""
    top_k, top_p = keeps
    cut = (tl.full((), 0, tl.uint32), tl.full((), NO_TOKEN, tl.int32))
    if top_k > 0:
        key_k, num_equal = _kth_key(source, entries, rules, top_k, BLOCK, HAS_MAP, HAS_WORK)
        last = _last_equal(source, entries, rules, key_k, num_equal, num_tokens, BLOCK, HAS_MAP, HAS_WORK)
        cut = (key_k, last)
    key_p = tl.full((), 0, tl.uint32)
    if top_p < 1.0:
        key_p = _top_p_key(source, entries, rules, cut, top_p, BLOCK, HAS_MAP, HAS_WORK)
    return _draw_survivor(source, entries, rules, cut, key_p, noise_key, BLOCK, HAS_MAP, HAS_WORK)


@triton.jit
def _draw_survivor(
    source, entries, rules, cut, key_p, noise_key, BLOCK: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr
):
    """The survivor with the best score, lowest id first among equals."""
    index, key_low, key_high = noise_key
    best_score = tl.full((), -float("inf"), tl.float64)
    drawn = tl.full((), NO_TOKEN, tl.int32)
    for at in tl.range(0, entries[1], BLOCK):
        token, y, key, alive = _load_survivors(source, entries, at, rules, cut, BLOCK, HAS_MAP, HAS_WORK)
        alive = alive & (key >= key_p)
        if tl.max(alive.to(tl.int32)) > 0:
            noise = gumbel(bits_of_tokens(index, token, key_low, key_high))
            score, first = best_of(tl.where(alive, y.to(tl.float64) + noise.to(tl.float64), -float("inf")), token)
            better = (score > best_score) | ((score == best_score) & (first < drawn))
            best_score = tl.where(better, score, best_score)
            drawn = tl.where(better, first, drawn)
    return drawn
