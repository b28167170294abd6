"""Sort a step's assignments, each a token and an expert that it takes, by expert, on the device: counts a chunk, then a
place for each assignment. Deterministic."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

TILE_COUNT_SHIFT = tl.constexpr(16)
"""A tile's entry is (number of its assignments) << 16 | local expert id."""
PAIR_COLUMNS = tl.constexpr(16)
"""Tiles of so many assignments are two halves of eight: each takes a product that wgmma, which has to be waited
for, does not do, a weight is widened once for both, and a tile of at most eight assignments takes one."""


@triton.constexpr_function
def half_columns(columns):  # type: ignore[no-untyped-def]
    """Columns of one product with a tile of so many assignments."""
    return columns // 2 if columns == PAIR_COLUMNS else columns


@triton.jit
def load_assignments(assignments, count, HALVES: tl.constexpr, COLUMNS: tl.constexpr):
    """Assignments of each half of a tile, and which of the columns have one: two tuples of [COLUMNS]."""
    found = ()
    valid = ()
    for half in tl.static_range(HALVES):
        column = half * COLUMNS + tl.arange(0, COLUMNS)
        is_valid = column < count
        found = found + (tl.load(assignments + column, mask=is_valid, other=0),)
        valid = valid + (is_valid,)
    return found, valid


@triton.jit
def _local_experts(TOPK_IDS, assignment, num_assignments, first_expert, num_experts):
    """Local expert ids of assignments, and whether the expert is held here."""
    local = tl.load(TOPK_IDS + assignment, mask=assignment < num_assignments, other=-1) - first_expert
    is_held = (assignment < num_assignments) & (local >= 0) & (local < num_experts)
    return tl.where(is_held, local, 0), is_held


@triton.jit(do_not_specialize=["num_assignments"])
def count_kernel(
    TOPK_IDS, COUNTS, num_assignments, first_expert, num_experts, CHUNK: tl.constexpr, BINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Count each expert's assignments in a chunk.

    Args:
        TOPK_IDS: [num_assignments] int32. COUNTS: [chunks, BINS] int32, written whole.
    """
    if PDL:
        gdc_wait()
    chunk = tl.program_id(0)
    assignment = chunk * CHUNK + tl.arange(0, CHUNK)
    local, is_held = _local_experts(TOPK_IDS, assignment, num_assignments, first_expert, num_experts)
    tl.store(COUNTS + chunk * BINS + tl.arange(0, BINS), tl.histogram(local, BINS, mask=is_held))


@triton.jit
def _sum_chunks(COUNTS, chunk, num_chunks, BINS: tl.constexpr):
    """Each expert's assignments in all chunks, and in those before this one: two [BINS] int32."""
    BLOCK: tl.constexpr = 8
    expert = tl.arange(0, BINS)
    totals = tl.zeros([BLOCK, BINS], tl.int32)
    before = tl.zeros([BLOCK, BINS], tl.int32)
    for first in range(0, num_chunks, BLOCK):
        part = first + tl.arange(0, BLOCK)
        counts = tl.load(COUNTS + part[:, None] * BINS + expert[None, :], mask=(part < num_chunks)[:, None], other=0)
        totals += counts
        before += tl.where((part < chunk)[:, None], counts, 0)
    return tl.sum(totals, axis=0), tl.sum(before, axis=0)


@triton.jit(do_not_specialize=["num_assignments", "num_chunks"])
def place_kernel(
    TOPK_IDS,
    COUNTS,
    TILE_ENTRIES,
    TILE_ASSIGNMENTS,
    NUM_TILES,
    num_assignments,
    first_expert,
    num_experts,
    num_chunks,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    SINGLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Give each assignment a slot: experts in order, each in whole tiles of COLUMNS slots, its assignments in order.

    Args:
        TOPK_IDS: [num_assignments] int32. COUNTS: [chunks, BINS], of `count_kernel`; unused if SINGLE, the only chunk.
        TILE_ENTRIES: [max tiles] int32, the first NUM_TILES written. TILE_ASSIGNMENTS: [max tiles * COLUMNS] int32.
        NUM_TILES: [1] int32.
    """
    if PDL:
        gdc_wait()
    chunk = tl.program_id(0)
    place = tl.arange(0, CHUNK)
    expert = tl.arange(0, BINS)
    local, is_held = _local_experts(TOPK_IDS, chunk * CHUNK + place, num_assignments, first_expert, num_experts)
    if SINGLE:
        counts = tl.histogram(local, BINS, mask=is_held)
        totals = counts
        before = tl.zeros([BINS], tl.int32)
    else:
        counts = tl.load(COUNTS + chunk * BINS + expert)
        totals, before = _sum_chunks(COUNTS, chunk, num_chunks, BINS)
    num_tiles = (totals + COLUMNS - 1) // COLUMNS
    first_tile = tl.cumsum(num_tiles, 0) - num_tiles

    # Sorted by expert, then by assignment; assignments of experts held elsewhere come last.
    order = tl.sort(tl.where(is_held, local, BINS) * CHUNK + place)
    sorted_local = order // CHUNK
    # A sorted place, less the places of smaller experts, is the rank among this chunk's assignments of the expert.
    base = first_tile * COLUMNS + before - (tl.cumsum(counts, 0) - counts)
    slot = tl.gather(base, tl.minimum(sorted_local, BINS - 1), 0) + place
    tl.store(TILE_ASSIGNMENTS + slot, chunk * CHUNK + order % CHUNK, mask=sorted_local < BINS)

    if chunk == 0:
        tl.store(NUM_TILES, tl.sum(num_tiles, 0))
        for rank in range(tl.max(num_tiles, 0)):
            count = tl.minimum(totals - rank * COLUMNS, COLUMNS)
            tl.store(TILE_ENTRIES + first_tile + rank, (count << TILE_COUNT_SHIFT) | expert, mask=rank < num_tiles)
