"""The experts' second product, and the weighted sum of a token's experts in the order of its choices."""

import triton
import triton.language as tl

from kimi_kernels.moe_experts.kernel_align import TILE_COUNT_SHIFT
from kimi_kernels.quantization.kernel_tiles import (
    TILE_ROWS,
    first_column,
    load_planes,
    multiply_steps,
    multiply_tile,
)


@triton.jit
def down_sorted_kernel(
    HIDDEN,
    TILES,
    SCALES,
    OUT,
    TILE_ENTRIES,
    TILE_CHOICES,
    NUM_TILES,
    intermediate_size,
    out_features,
    num_row_tiles,
    num_steps,
    num_groups,
    tiles_a_group,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    EVEN: tl.constexpr,
    PORTABLE: tl.constexpr,
    RESIDENT_STEPS: tl.constexpr,
):
    """One program a tile of choices of one expert and a group of row tiles.

    Args:
        HIDDEN: [T * top_k, intermediate_size]. TILES, SCALES: of down. OUT: [T * top_k, out_features], row = choice.
        TILE_ENTRIES, TILE_CHOICES, NUM_TILES: as `place_kernel` writes them.
        RESIDENT_STEPS: num_steps if the activations stay on the multiprocessor while the group's row tiles stream by;
            else 0.
    """
    program = tl.program_id(0)
    group = program % num_groups
    tile = program // num_groups
    if tile >= tl.load(NUM_TILES):
        return
    entry = tl.load(TILE_ENTRIES + tile)
    column = tl.arange(0, COLUMNS)
    is_valid = column < (entry >> TILE_COUNT_SHIFT)
    choice = tl.load(TILE_CHOICES + tile * COLUMNS + column, mask=is_valid, other=0).to(tl.int64)
    first_matrix = (entry & 0xFFFF).to(tl.int64) * num_row_tiles
    x_rows = HIDDEN + choice * intermediate_size
    targets = OUT + choice * out_features
    first_row_tile = group * tiles_a_group
    end_row_tile = tl.minimum(first_row_tile + tiles_a_group, num_row_tiles)
    TILE_WORDS: tl.constexpr = TILE_ROWS * WORDS
    if RESIDENT_STEPS > 0:
        planes = load_planes(x_rows, is_valid, 0, intermediate_size, KIND, EVEN)
        if RESIDENT_STEPS > 1:
            planes_1 = load_planes(x_rows, is_valid, 1, intermediate_size, KIND, EVEN)
        for row_tile in tl.range(first_row_tile, end_row_tile, num_stages=STAGES):
            matrix = first_matrix + row_tile
            tiles = TILES + matrix * (RESIDENT_STEPS * TILE_WORDS)
            scales = SCALES + matrix * (RESIDENT_STEPS * TILE_ROWS)
            acc = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
            acc = multiply_tile(acc, tiles, scales, 0, planes, 1.0, KIND, TILE_ROWS, SCALE_WEIGHTS, PORTABLE)
            if RESIDENT_STEPS > 1:
                acc = multiply_tile(acc, tiles, scales, 1, planes_1, 1.0, KIND, TILE_ROWS, SCALE_WEIGHTS, PORTABLE)
            _store_product(targets, acc, row_tile, is_valid, out_features)
    else:
        for row_tile in range(first_row_tile, end_row_tile):
            matrix = first_matrix + row_tile
            acc = multiply_steps(
                TILES + matrix * num_steps * TILE_WORDS,
                SCALES + matrix * num_steps * TILE_ROWS,
                x_rows,
                is_valid,
                0,
                num_steps,
                intermediate_size,
                KIND,
                TILE_ROWS,
                COLUMNS,
                STAGES,
                SCALE_WEIGHTS,
                EVEN,
                PORTABLE,
            )
            _store_product(targets, acc, row_tile, is_valid, out_features)


@triton.jit
def _store_product(targets, acc, row_tile, is_valid, out_features):
    row = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    mask = is_valid[None, :] & (row < out_features)[:, None]
    tl.store(targets[None, :] + row[:, None], acc.to(targets.dtype.element_ty), mask=mask)


@triton.jit
def sum_choices_kernel(
    PRODUCTS,
    TOPK_IDS,
    TOPK_WEIGHTS,
    OUT,
    first_expert,
    num_experts,
    out_features,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """OUT[t] = sum over t's choices of weight * PRODUCTS[choice]; experts held elsewhere add nothing.

    Args:
        PRODUCTS: [T * TOP_K, out_features]. TOPK_IDS, TOPK_WEIGHTS: [T, TOP_K]. OUT: [T, out_features].
    """
    token = tl.program_id(0)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        index = token * TOP_K + choice
        local = tl.load(TOPK_IDS + index) - first_expert
        is_held = (local >= 0) & (local < num_experts)
        product = tl.load(
            PRODUCTS + index.to(tl.int64) * out_features + feature, mask=is_held & (feature < out_features), other=0.0
        )
        total += tl.load(TOPK_WEIGHTS + index) * product.to(tl.float32)
    target = OUT + token.to(tl.int64) * out_features + feature
    tl.store(target, total.to(OUT.dtype.element_ty), mask=feature < out_features)


@triton.jit
def down_token_kernel(
    HIDDEN,
    TILES,
    SCALES,
    OUT,
    TOPK_IDS,
    TOPK_WEIGHTS,
    first_expert,
    num_experts,
    intermediate_size,
    out_features,
    num_row_tiles,
    num_steps,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    """For few tokens, unsorted: one program a token and ROWS rows; it walks the token's experts one after another.

    Args:
        HIDDEN: [T * top_k, intermediate_size]. TOPK_IDS, TOPK_WEIGHTS: [T, top_k]. OUT: [T, out_features].
    """
    PARTS: tl.constexpr = TILE_ROWS // ROWS
    program = tl.program_id(0)
    part = program % PARTS
    row_tile = program // PARTS % num_row_tiles
    token = program // PARTS // num_row_tiles
    tiles = TILES + part * (ROWS * WORDS)
    scales = SCALES + part * ROWS
    is_first = tl.arange(0, COLUMNS) == 0
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    # All ids before the loop: a load whose address comes from another load halves the depth of the pipeline.
    locals_ = ()
    weights = ()
    for c in tl.static_range(TOP_K):
        local = tl.load(TOPK_IDS + token * TOP_K + c) - first_expert
        is_held = (local >= 0) & (local < num_experts)
        # Another rank's expert costs a read of expert 0 and adds nothing: its activations are not read but zero.
        locals_ = locals_ + (tl.where(is_held, local, -1),)
        weights = weights + (tl.where(is_held, tl.load(TOPK_WEIGHTS + token * TOP_K + c), 0.0),)
    for i in tl.range(0, TOP_K * num_steps, num_stages=STAGES):
        rank = i // num_steps
        step = i % num_steps
        local = locals_[0]
        weight = weights[0]
        for c in tl.static_range(1, TOP_K):
            local = tl.where(rank == c, locals_[c], local)
            weight = tl.where(rank == c, weights[c], weight)
        matrix = tl.maximum(local, 0).to(tl.int64) * num_row_tiles + row_tile
        x_rows = HIDDEN + (token * TOP_K + rank) * intermediate_size + tl.zeros([COLUMNS], tl.int64)
        planes = load_planes(x_rows, is_first & (local >= 0), step, intermediate_size, KIND, EVEN)
        acc = multiply_tile(
            acc,
            tiles + matrix * num_steps * (TILE_ROWS * WORDS),
            scales + matrix * num_steps * TILE_ROWS,
            step,
            planes,
            weight,
            KIND,
            ROWS,
            False,
            PORTABLE,
        )
    row = row_tile * TILE_ROWS + part * ROWS + tl.arange(0, ROWS)
    tl.store(OUT + token * out_features + row, first_column(acc).to(OUT.dtype.element_ty), mask=row < out_features)
