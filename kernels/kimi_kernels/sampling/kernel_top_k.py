# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""List the tokens that top-k may keep, so that `kernel_select` need not read whole rows.

The first pass left the largest y of each place of each split's tiles: at least k tokens reach the k-th largest of
those, and hardly more do.
"""

import triton
import triton.language as tl

from kimi_kernels.sampling.kernel_draw import STATE_TOP_K, load_tile, tile_columns
from kimi_kernels.sampling.kernel_noise import inverse_temperature, order_key

LISTED = tl.constexpr(4096)
"""Tokens that fit a row's list; a row with more to list is selected from all tokens."""
NEVER = tl.constexpr(0xFFFFFFFF)
"""A key above all."""


@triton.jit
def threshold_kernel(
    SEQUENCE,
    TOP_K,
    STATE,
    MAXIMA,
    THRESHOLD,
    NUM_MAXIMA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The key of the k-th largest of a row's maxima, cut to its upper 16 bits; NEVER if k is more than fit a list.

    Args:
        MAXIMA: [R, NUM_MAXIMA] float32. THRESHOLD: [R] uint32 out, where STATE is STATE_TOP_K.
    """
    row = tl.program_id(0)
    if tl.load(STATE + row) == STATE_TOP_K:
        top_k = tl.load(TOP_K + tl.load(SEQUENCE + row))
        key_k = tl.full((), 0, tl.uint32)
        left = top_k
        num_real = tl.full((), 0, tl.int32)
        for digit in tl.static_range(2):
            shift = 24 - 8 * digit
            counts = tl.zeros((256,), tl.int32)
            for at in tl.range(0, NUM_MAXIMA, BLOCK):
                entry = at + tl.arange(0, BLOCK)
                y = tl.load(
                    MAXIMA + row.to(tl.int64) * NUM_MAXIMA + entry, mask=entry < NUM_MAXIMA, other=-float("inf")
                )
                key = order_key(y)
                is_real = y > -float("inf")
                if digit > 0:
                    is_real = is_real & ((key >> (shift + 8)) == (key_k >> (shift + 8)))
                counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=is_real)
            if digit == 0:
                num_real = tl.sum(counts)
            above = tl.sum(counts) - tl.cumsum(counts, 0)
            is_digit = (above < left) & (left <= above + counts)
            key_k = key_k | (tl.sum(tl.where(is_digit, tl.arange(0, 256), 0)).to(tl.uint32) << shift)
            left -= tl.sum(tl.where(is_digit, above, 0))
        tl.store(THRESHOLD + row, tl.where((top_k <= num_real) & (top_k <= LISTED), key_k, NEVER))


@triton.jit
def collect_kernel(
    LOGITS,
    WORK,
    USES_WORK,
    SEQUENCE,
    TEMPERATURE,
    TOKEN_OF_COLUMN,
    STATE,
    THRESHOLD,
    LIST,
    NUM_LISTED,
    row_stride,
    num_columns,
    SPLITS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_WORK: tl.constexpr,
):
    """Append one split's tokens that reach the row's threshold to its list, in any order.

    Args:
        as `draw_kernel`. LIST: [R, LISTED] int32. NUM_LISTED: [R] int32, zeros: how many there are, also beyond LISTED.
    """
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    if tl.load(STATE + row) == STATE_TOP_K:
        threshold = tl.load(THRESHOLD + row)
        if threshold != NEVER:
            inverse = inverse_temperature(tl.load(TEMPERATURE + tl.load(SEQUENCE + row)))
            uses_work = False
            if HAS_WORK:
                uses_work = tl.load(USES_WORK + row) != 0
            source = (LOGITS, WORK, TOKEN_OF_COLUMN, row, row_stride, num_columns, uses_work)
            start = split * SPLIT_COLUMNS
            stop = tl.minimum(start + SPLIT_COLUMNS, num_columns)
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
