"""Sort the step's choices by expert, on the device: counts a chunk, then a place for each choice. Deterministic."""

import triton
import triton.language as tl

TILE_COUNT_SHIFT = tl.constexpr(16)
"""A tile's entry is (number of its choices) << 16 | local expert id."""


@triton.jit
def _local_experts(TOPK_IDS, choice, num_choices, first_expert, num_experts):
    """Local expert ids of choices, and whether the expert is held here."""
    local = tl.load(TOPK_IDS + choice, mask=choice < num_choices, other=-1) - first_expert
    is_held = (choice < num_choices) & (local >= 0) & (local < num_experts)
    return tl.where(is_held, local, 0), is_held


@triton.jit
def count_kernel(TOPK_IDS, COUNTS, num_choices, first_expert, num_experts, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """Count each expert's choices in a chunk.

    Args:
        TOPK_IDS: [num_choices] int32. COUNTS: [chunks, BINS] int32, written whole.
    """
    chunk = tl.program_id(0)
    choice = chunk * CHUNK + tl.arange(0, CHUNK)
    local, is_held = _local_experts(TOPK_IDS, choice, num_choices, first_expert, num_experts)
    tl.store(COUNTS + chunk * BINS + tl.arange(0, BINS), tl.histogram(local, BINS, mask=is_held))


@triton.jit
def place_kernel(
    TOPK_IDS,
    COUNTS,
    TILE_ENTRIES,
    TILE_CHOICES,
    NUM_TILES,
    num_choices,
    first_expert,
    num_experts,
    num_chunks,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Give each choice a slot: experts in order, each in whole tiles of COLUMNS slots, choices in order within one.

    Args:
        TOPK_IDS: [num_choices] int32. COUNTS: [chunks, BINS], of `count_kernel`; unused if SINGLE, the only chunk.
        TILE_ENTRIES: [max tiles] int32, the first NUM_TILES written. TILE_CHOICES: [max tiles * COLUMNS] int32: choices.
        NUM_TILES: [1] int32.
    """
    chunk = tl.program_id(0)
    choice = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.arange(0, BINS)
    local, is_held = _local_experts(TOPK_IDS, choice, num_choices, first_expert, num_experts)
    totals = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    if SINGLE:
        totals += tl.histogram(local, BINS, mask=is_held)
    else:
        for part in range(num_chunks):
            counts = tl.load(COUNTS + part * BINS + expert)
            totals += counts
            before += tl.where(part < chunk, counts, 0)
    num_tiles = (totals + COLUMNS - 1) // COLUMNS
    first_tile = tl.cumsum(num_tiles, 0) - num_tiles

    rank = tl.zeros([CHUNK], tl.int32)
    BLOCK: tl.constexpr = 32
    for block in range(0, CHUNK, BLOCK):
        earlier = chunk * CHUNK + block + tl.arange(0, BLOCK)
        other, other_is_held = _local_experts(TOPK_IDS, earlier, num_choices, first_expert, num_experts)
        same = (local[:, None] == other[None, :]) & other_is_held[None, :] & (earlier[None, :] < choice[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    slot = tl.gather(first_tile * COLUMNS + before, local, 0) + rank
    tl.store(TILE_CHOICES + slot, choice, mask=is_held)

    if chunk == 0:
        tl.store(NUM_TILES, tl.sum(num_tiles, 0))
        for place in range(tl.max(num_tiles, 0)):
            count = tl.minimum(totals - place * COLUMNS, COLUMNS)
            tl.store(TILE_ENTRIES + first_tile + place, (count << TILE_COUNT_SHIFT) | expert, mask=place < num_tiles)
