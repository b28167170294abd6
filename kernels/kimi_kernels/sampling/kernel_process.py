# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Penalties, bias and bans, for rows that use any: into a float32 working copy, which the other kernels then read."""

import triton
import triton.language as tl

from kimi_kernels.sampling.kernel_noise import is_not_finite


@triton.jit
def _has_entries(OFFSETS, sequence):
    return tl.load(OFFSETS + sequence + 1) > tl.load(OFFSETS + sequence)


@triton.jit
def copy_kernel(
    LOGITS,
    WORK,
    USES_WORK,
    WORK_BAD,
    SEQUENCE,
    PENALTY_OFFSETS,
    BIAS_OFFSETS,
    BAN_OFFSETS,
    BAD_WORD_OFFSETS,
    MASK_OF_ROW,
    row_stride,
    num_columns,
    SPLITS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Copy one split of a row that uses a processor.

    Args:
        as `draw_kernel`. MASK_OF_ROW: [R] int32. WORK_BAD: [R] int32, zeros.
    """
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    sequence = tl.load(SEQUENCE + row)
    uses = _has_entries(PENALTY_OFFSETS, sequence) | _has_entries(BIAS_OFFSETS, sequence)
    uses = uses | _has_entries(BAN_OFFSETS, sequence) | _has_entries(BAD_WORD_OFFSETS, sequence)
    if HAS_MASK:
        uses = uses | (tl.load(MASK_OF_ROW + row) >= 0)
    if split == 0:
        tl.store(USES_WORK + row, uses.to(tl.int32))
    if uses:
        bad = tl.zeros((BLOCK,), tl.int32)
        start = split * SPLIT_COLUMNS
        stop = tl.minimum(start + SPLIT_COLUMNS, num_columns)
        for at in tl.range(start, stop, BLOCK):
            column = at + tl.arange(0, BLOCK)
            mask = column < stop
            value = tl.load(LOGITS + row.to(tl.int64) * row_stride + column, mask=mask, other=0.0).to(tl.float32)
            bad |= is_not_finite(value).to(tl.int32)
            tl.store(WORK + row.to(tl.int64) * num_columns + column, value, mask=mask)
        tl.atomic_max(WORK_BAD + row, tl.max(bad))


@triton.jit
def _columns_of(target, token, mask, HAS_MAP: tl.constexpr):
    """Columns of tokens, and which have one. target: (row of WORK, COLUMN_OF_TOKEN, num_columns)."""
    if HAS_MAP:
        column = tl.load(target[1] + token, mask=mask & (token >= 0), other=-1).to(tl.int32)
    else:
        column = token
    return column, mask & (token >= 0) & (column >= 0) & (column < target[2])


@triton.jit
def _penalise(value, seen, count, penalties):
    """penalties: (repetition, its inverse, frequency, presence)."""
    repetition, inverse, frequency, presence = penalties
    value = tl.where(seen, tl.where(value > 0.0, value * inverse, value * repetition), value)
    value = value - frequency * count.to(tl.float32)
    return tl.where(count > 0, value - presence, value)


@triton.jit
def process_kernel(
    WORK,
    USES_WORK,
    SEQUENCE,
    TOKEN_INDEX,
    WINDOW,
    WINDOW_LEN,
    COLUMN_OF_TOKEN,
    REPETITION,
    FREQUENCY,
    PRESENCE,
    PENALTY_OFFSETS,
    PENALTY_IDS,
    PENALTY_COUNTS,
    PENALTY_IN_PROMPT,
    BIAS_OFFSETS,
    BIAS_IDS,
    BIAS_VALUES,
    BAN_OFFSETS,
    BAN_IDS,
    BAN_UNTIL,
    BAD_WORD_OFFSETS,
    BAD_WORD_TOKEN_OFFSETS,
    BAD_WORD_TOKENS,
    HISTORY_TAIL,
    num_columns,
    window_width,
    max_tail,
    BLOCK: tl.constexpr,
    WINDOW_P2: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """Change the working copy of one row, in the order of docs/sampling.md, section 4. Shapes: `sampling_inputs`."""
    row = tl.program_id(0)
    if tl.load(USES_WORK + row) != 0:
        sequence = tl.load(SEQUENCE + row)
        ROW = WORK + row.to(tl.int64) * num_columns
        target = (ROW, COLUMN_OF_TOKEN, num_columns)
        window_len = tl.load(WINDOW_LEN + row)
        repetition = tl.load(REPETITION + sequence)
        penalties = (
            repetition,
            tl.div_rn(1.0, repetition),
            tl.load(FREQUENCY + sequence),
            tl.load(PRESENCE + sequence),
        )
        start, stop = tl.load(PENALTY_OFFSETS + sequence), tl.load(PENALTY_OFFSETS + sequence + 1)
        place = tl.arange(0, WINDOW_P2)
        stands = place < tl.minimum(window_len, window_width)
        window = tl.load(WINDOW + sequence * window_width + place, mask=stands, other=-1)
        is_entry = tl.zeros((WINDOW_P2,), tl.int32)
        for at in tl.range(start, stop, BLOCK):
            entry = at + tl.arange(0, BLOCK)
            mask = entry < stop
            token = tl.load(PENALTY_IDS + entry, mask=mask, other=-2)
            count = tl.load(PENALTY_COUNTS + entry, mask=mask, other=0)
            in_prompt = tl.load(PENALTY_IN_PROMPT + entry, mask=mask, other=0) != 0
            equal = ((token[:, None] == window[None, :]) & stands[None, :]).to(tl.int32)
            count += tl.sum(equal, 1)
            is_entry |= tl.max(equal, 0)
            column, has_column = _columns_of(target, token, mask, HAS_MAP)
            value = tl.load(target[0] + column, mask=has_column, other=0.0)
            tl.store(target[0] + column, _penalise(value, in_prompt | (count > 0), count, penalties), mask=has_column)
        # Window tokens that no entry holds, each at its first place.
        equal = ((window[:, None] == window[None, :]) & stands[None, :]).to(tl.int32)
        is_first = tl.sum(tl.where(place[None, :] < place[:, None], equal, 0), 1) == 0
        mask = stands & is_first & (is_entry == 0) & (stop > start)
        column, has_column = _columns_of(target, window, mask, HAS_MAP)
        value = tl.load(target[0] + column, mask=has_column, other=0.0)
        tl.store(target[0] + column, _penalise(value, has_column, tl.sum(equal, 1), penalties), mask=has_column)
        tl.debug_barrier()
        _add_bias(target, BIAS_OFFSETS, BIAS_IDS, BIAS_VALUES, sequence, BLOCK, HAS_MAP)
        tl.debug_barrier()
        index = tl.load(TOKEN_INDEX + row)
        _ban_tokens(target, BAN_OFFSETS, BAN_IDS, BAN_UNTIL, sequence, index, BLOCK, HAS_MAP)
        before = (HISTORY_TAIL + sequence * max_tail, max_tail, WINDOW + sequence * window_width, window_len)
        words = (BAD_WORD_OFFSETS, BAD_WORD_TOKEN_OFFSETS, BAD_WORD_TOKENS)
        _ban_words(target, words, before, sequence, HAS_MAP)


@triton.jit
def _add_bias(target, OFFSETS, IDS, VALUES, sequence, BLOCK: tl.constexpr, HAS_MAP: tl.constexpr):
    stop = tl.load(OFFSETS + sequence + 1)
    for at in tl.range(tl.load(OFFSETS + sequence), stop, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        mask = entry < stop
        token = tl.load(IDS + entry, mask=mask, other=-1)
        column, has_column = _columns_of(target, token, mask, HAS_MAP)
        value = tl.load(target[0] + column, mask=has_column, other=0.0)
        tl.store(target[0] + column, value + tl.load(VALUES + entry, mask=mask, other=0.0), mask=has_column)


@triton.jit
def _ban_tokens(target, OFFSETS, IDS, UNTIL, sequence, index, BLOCK: tl.constexpr, HAS_MAP: tl.constexpr):
    stop = tl.load(OFFSETS + sequence + 1)
    for at in tl.range(tl.load(OFFSETS + sequence), stop, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        mask = entry < stop
        token = tl.load(IDS + entry, mask=mask, other=-1)
        mask = mask & (index < tl.load(UNTIL + entry, mask=mask, other=0))
        column, has_column = _columns_of(target, token, mask, HAS_MAP)
        tl.store(target[0] + column, tl.full((BLOCK,), -float("inf"), tl.float32), mask=has_column)


@triton.jit
def _ban_words(target, words, before, sequence, HAS_MAP: tl.constexpr):
    """words: (OFFSETS, TOKEN_OFFSETS, TOKENS). before: (HISTORY, max_tail, WINDOW, window_len) of the sequence."""
    OFFSETS, TOKEN_OFFSETS, TOKENS = words
    HISTORY, max_tail, WINDOW, window_len = before
    for word in tl.range(tl.load(OFFSETS + sequence), tl.load(OFFSETS + sequence + 1)):
        start, stop = tl.load(TOKEN_OFFSETS + word), tl.load(TOKEN_OFFSETS + word + 1)
        matches = stop > start
        for back in tl.range(1, stop - start):
            at = max_tail + window_len - back
            in_window = at >= max_tail
            in_history = (at >= 0) & (at < max_tail)
            from_window = tl.load(WINDOW + at - max_tail, mask=in_window, other=-1)
            from_history = tl.load(HISTORY + at, mask=in_history, other=-1)
            token = tl.where(in_window, from_window, from_history)
            matches = matches & (token == tl.load(TOKENS + stop - 1 - back))
        column, has_column = _columns_of(target, tl.load(TOKENS + stop - 1), matches, HAS_MAP)
        tl.store(target[0] + column, -float("inf"), mask=has_column)
