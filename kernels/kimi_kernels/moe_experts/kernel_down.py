"""The experts' second product, for each assignment of each token."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kimi_kernels.moe_experts.kernel_align import TILE_COUNT_SHIFT, half_columns, load_assignments
from kimi_kernels.quantization.kernel_tiles import (
    TILE_ROWS,
    load_halves,
    multiply_steps,
    multiply_tile,
    zeros_of,
)


@triton.jit
def down_sorted_kernel(
    HIDDEN,
    TILES,
    SCALES,
    OUT,
    TILE_ENTRIES,
    TILE_ASSIGNMENTS,
    NUM_TILES,
    TOPK_IDS,
    first_expert,
    num_experts,
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
    SORTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a tile of assignments of one expert and a group of row tiles.

    Args:
        HIDDEN: [T * top_k, intermediate_size]. TILES, SCALES: of down. OUT: [T * top_k, out_features], a row an
            assignment.
        TILE_ENTRIES, TILE_ASSIGNMENTS, NUM_TILES: as `place_kernel` writes them; unused unless SORTED.
        TOPK_IDS: [T * top_k] int32, unused if SORTED: a tile is one assignment then.
        RESIDENT_STEPS: num_steps if the activations stay on the multiprocessor while the group's row tiles stream by;
            else 0.
    """
    program = tl.program_id(0)
    group = program % num_groups
    tile = program // num_groups
    if PDL:
        gdc_wait()
    first_row_tile = group * tiles_a_group
    end_row_tile = tl.minimum(first_row_tile + tiles_a_group, num_row_tiles)
    if SORTED:
        if tile >= tl.load(NUM_TILES):
            return
        entry = tl.load(TILE_ENTRIES + tile)
        count = entry >> TILE_COUNT_SHIFT
        assignments = TILE_ASSIGNMENTS + tile * COLUMNS
        first_matrix = (entry & 0xFFFF).to(tl.int64) * num_row_tiles
        HALF_COLUMNS: tl.constexpr = half_columns(COLUMNS)
        if COLUMNS > HALF_COLUMNS:
            if count > HALF_COLUMNS:
                assignment, is_valid = load_assignments(assignments, count, 2, HALF_COLUMNS)
                _multiply_rows(
                    HIDDEN, TILES, SCALES, OUT, assignment, is_valid, first_matrix, first_row_tile, end_row_tile,
                    intermediate_size, out_features, num_steps, KIND, WORDS, HALF_COLUMNS, STAGES, SCALE_WEIGHTS, EVEN,
                    PORTABLE, RESIDENT_STEPS,
                )  # fmt: skip
                return
        assignment, is_valid = load_assignments(assignments, count, 1, HALF_COLUMNS)
        _multiply_rows(
            HIDDEN, TILES, SCALES, OUT, assignment, is_valid, first_matrix, first_row_tile, end_row_tile,
            intermediate_size, out_features, num_steps, KIND, WORDS, HALF_COLUMNS, STAGES, SCALE_WEIGHTS, EVEN,
            PORTABLE, RESIDENT_STEPS,
        )  # fmt: skip
    else:
        expert = tl.load(TOPK_IDS + tile) - first_expert
        if (expert < 0) | (expert >= num_experts):
            return
        assignment = (tile + tl.zeros([COLUMNS], tl.int32),)
        is_valid = (tl.arange(0, COLUMNS) == 0,)
        _multiply_rows(
            HIDDEN, TILES, SCALES, OUT, assignment, is_valid, expert.to(tl.int64) * num_row_tiles, first_row_tile,
            end_row_tile, intermediate_size, out_features, num_steps, KIND, WORDS, COLUMNS, STAGES, SCALE_WEIGHTS,
            EVEN, PORTABLE, RESIDENT_STEPS,
        )  # fmt: skip


@triton.jit
def _multiply_rows(
    HIDDEN, TILES, SCALES, OUT, assignment, is_valid, first_matrix, first_row_tile, end_row_tile, intermediate_size,
    out_features, num_steps, KIND: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr, EVEN: tl.constexpr, PORTABLE: tl.constexpr, RESIDENT_STEPS: tl.constexpr,
):  # fmt: skip
    """Products of some row tiles with one or two halves of COLUMNS assignments."""
    x_rows = ()
    for half in tl.static_range(len(assignment)):
        x_rows = x_rows + (HIDDEN + assignment[half].to(tl.int64) * intermediate_size,)
    TILE_WORDS: tl.constexpr = TILE_ROWS * WORDS
    if RESIDENT_STEPS > 0:
        halves = load_halves(x_rows, is_valid, 0, intermediate_size, KIND, EVEN)
        if RESIDENT_STEPS > 1:
            halves_1 = load_halves(x_rows, is_valid, 1, intermediate_size, KIND, EVEN)
        for row_tile in tl.range(first_row_tile, end_row_tile, num_stages=STAGES):
            matrix = first_matrix + row_tile
            tiles = TILES + matrix * (RESIDENT_STEPS * TILE_WORDS)
            scales = SCALES + matrix * (RESIDENT_STEPS * TILE_ROWS)
            accs = zeros_of(assignment, TILE_ROWS, COLUMNS)
            accs = multiply_tile(
                accs, tiles, scales, 0, halves, KIND, WORDS, TILE_ROWS, COLUMNS, SCALE_WEIGHTS, PORTABLE
            )
            if RESIDENT_STEPS > 1:
                accs = multiply_tile(
                    accs, tiles, scales, 1, halves_1, KIND, WORDS, TILE_ROWS, COLUMNS, SCALE_WEIGHTS, PORTABLE
                )
            _store_products(OUT, accs, assignment, is_valid, row_tile, out_features)
    else:
        for row_tile in range(first_row_tile, end_row_tile):
            matrix = first_matrix + row_tile
            accs = multiply_steps(
                TILES + matrix * num_steps * TILE_WORDS, SCALES + matrix * num_steps * TILE_ROWS, x_rows, is_valid, 0,
                num_steps, intermediate_size, KIND, WORDS, TILE_ROWS, COLUMNS, STAGES, SCALE_WEIGHTS, EVEN, PORTABLE,
            )  # fmt: skip
            _store_products(OUT, accs, assignment, is_valid, row_tile, out_features)


@triton.jit
def _store_products(OUT, accs, assignment, is_valid, row_tile, out_features):
    row = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    for half in tl.static_range(len(accs)):
        target = OUT + assignment[half].to(tl.int64)[None, :] * out_features + row[:, None]
        mask = is_valid[half][None, :] & (row < out_features)[:, None]
        tl.store(target, accs[half].to(OUT.dtype.element_ty), mask=mask)
