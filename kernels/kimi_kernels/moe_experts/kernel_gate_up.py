"""The experts' first product with the activation: hidden = silu(gate(x)) * up(x), for each assignment of each token."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kimi_kernels.moe_experts.kernel_align import TILE_COUNT_SHIFT, half_columns, load_assignments
from kimi_kernels.quantization.kernel_tiles import TILE_ROWS, first_column, multiply_steps

STRIPE = tl.constexpr(8)
HALF = tl.constexpr(64)


@triton.jit
def _activate(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gate_up_sorted_kernel(
    X,
    TILES,
    SCALES,
    HIDDEN,
    TILE_ENTRIES,
    TILE_ASSIGNMENTS,
    NUM_TILES,
    x_stride,
    top_k,
    in_features,
    intermediate_size,
    num_row_tiles,
    num_steps,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    EVEN: tl.constexpr,
    PORTABLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a tile of assignments of one expert and a row tile: 64 gate rows and their 64 up rows in stripes of
    8.

    Args:
        X: [T, in_features]. TILES, SCALES: of gate_up. HIDDEN: [T * top_k, intermediate_size], row = assignment.
        TILE_ENTRIES, TILE_ASSIGNMENTS, NUM_TILES: as `place_kernel` writes them.
    """
    program = tl.program_id(0)
    row_tile = program % num_row_tiles
    tile = program // num_row_tiles
    if PDL:
        gdc_wait()
    if tile >= tl.load(NUM_TILES):
        return
    entry = tl.load(TILE_ENTRIES + tile)
    count = entry >> TILE_COUNT_SHIFT
    assignments = TILE_ASSIGNMENTS + tile * COLUMNS
    matrix = (entry & 0xFFFF).to(tl.int64) * num_row_tiles + row_tile
    tiles = TILES + matrix * num_steps * (TILE_ROWS * WORDS)
    scales = SCALES + matrix * num_steps * TILE_ROWS
    HALF_COLUMNS: tl.constexpr = half_columns(COLUMNS)
    if COLUMNS > HALF_COLUMNS:
        if count > HALF_COLUMNS:
            _multiply_assignments(
                X, tiles, scales, HIDDEN, assignments, count, x_stride, top_k, in_features, intermediate_size, row_tile,
                num_steps, KIND, WORDS, 2, HALF_COLUMNS, STAGES, SCALE_WEIGHTS, EVEN, PORTABLE,
            )  # fmt: skip
            return
    _multiply_assignments(
        X, tiles, scales, HIDDEN, assignments, count, x_stride, top_k, in_features, intermediate_size, row_tile,
        num_steps, KIND, WORDS, 1, HALF_COLUMNS, STAGES, SCALE_WEIGHTS, EVEN, PORTABLE,
    )  # fmt: skip


@triton.jit
def _multiply_assignments(
    X, tiles, scales, HIDDEN, assignments, count, x_stride, top_k, in_features, intermediate_size, row_tile, num_steps,
    KIND: tl.constexpr, WORDS: tl.constexpr, HALVES: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr, EVEN: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """The activations of a row tile and one or two halves of a tile of assignments."""
    assignment, is_valid = load_assignments(assignments, count, HALVES, COLUMNS)
    x_rows = ()
    for half in tl.static_range(HALVES):
        x_rows = x_rows + (X + (assignment[half] // top_k).to(tl.int64) * x_stride,)
    accs = multiply_steps(
        tiles, scales, x_rows, is_valid, 0, num_steps, in_features, KIND, WORDS, TILE_ROWS, COLUMNS, STAGES,
        SCALE_WEIGHTS, EVEN, PORTABLE,
    )  # fmt: skip
    row = row_tile * HALF + tl.arange(0, HALF)
    for half in tl.static_range(HALVES):
        # Rows r and r + 8 belong to the same thread: splitting the stripes moves no data.
        gate, up = tl.split(accs[half].reshape(STRIPE, 2, STRIPE, COLUMNS).permute(0, 2, 3, 1))
        hidden = _activate(gate, up).reshape(HALF, COLUMNS)
        target = HIDDEN + assignment[half].to(tl.int64)[None, :] * intermediate_size + row[:, None]
        mask = is_valid[half][None, :] & (row < intermediate_size)[:, None]
        tl.store(target, hidden.to(HIDDEN.dtype.element_ty), mask=mask)


@triton.jit
def gate_up_unsorted_kernel(
    X,
    TILES,
    SCALES,
    HIDDEN,
    PARTIALS,
    ARRIVALS,
    TOPK_IDS,
    x_stride,
    top_k,
    first_expert,
    num_experts,
    in_features,
    intermediate_size,
    num_row_tiles,
    num_steps,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    PORTABLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The product for few tokens, unsorted: one program an assignment, a row tile and one of SPLITS ranges of columns.

    The last of a row tile's programs to finish sums the partial products, always in the order of the ranges.

    Args:
        HIDDEN: [T * top_k, intermediate_size]. TOPK_IDS: [T * top_k] int32.
        PARTIALS: [T * top_k * num_row_tiles, SPLITS, 128] float32, scratch.
        ARRIVALS: [T * top_k * num_row_tiles] int32, zero, and zero again at the end.
    """
    program = tl.program_id(0)
    split = program % SPLITS
    row_tile = program // SPLITS % num_row_tiles
    assignment = program // SPLITS // num_row_tiles
    if PDL:
        gdc_wait()
    expert = tl.load(TOPK_IDS + assignment) - first_expert
    if (expert < 0) | (expert >= num_experts):
        return
    matrix = expert.to(tl.int64) * num_row_tiles + row_tile
    x_row = X + (assignment // top_k).to(tl.int64) * x_stride
    accs = multiply_steps(
        TILES + matrix * num_steps * (TILE_ROWS * WORDS),
        SCALES + matrix * num_steps * TILE_ROWS,
        (x_row + tl.zeros([COLUMNS], tl.int64),),
        (tl.arange(0, COLUMNS) == 0,),
        split * num_steps // SPLITS,
        (split + 1) * num_steps // SPLITS,
        in_features,
        KIND,
        WORDS,
        TILE_ROWS,
        COLUMNS,
        STAGES,
        False,
        EVEN,
        PORTABLE,
    )
    product = first_column(accs[0])
    hidden_row = row_tile * HALF + tl.arange(0, HALF)
    target = HIDDEN + assignment * intermediate_size + hidden_row
    if SPLITS == 1:
        gate, up = tl.split(product.reshape(STRIPE, 2, STRIPE).permute(0, 2, 1))
        hidden = _activate(gate, up).reshape(HALF)
        tl.store(target, hidden.to(HIDDEN.dtype.element_ty), mask=hidden_row < intermediate_size)
    else:
        place = assignment * num_row_tiles + row_tile
        partials = PARTIALS + place * (SPLITS * TILE_ROWS)
        tl.store(partials + split * TILE_ROWS + tl.arange(0, TILE_ROWS), product)
        # Every thread's store must come before the count that announces it.
        tl.debug_barrier()
        if tl.atomic_add(ARRIVALS + place, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(ARRIVALS + place, 0)
            row = tl.arange(0, HALF)
            gate_row = row // STRIPE * (2 * STRIPE) + row % STRIPE
            gate = tl.zeros([HALF], tl.float32)
            up = tl.zeros([HALF], tl.float32)
            for part in tl.static_range(SPLITS):
                # .cg: another multiprocessor wrote them, so this one's L1 must not answer.
                gate += tl.load(partials + part * TILE_ROWS + gate_row, cache_modifier=".cg")
                up += tl.load(partials + part * TILE_ROWS + gate_row + STRIPE, cache_modifier=".cg")
            hidden = _activate(gate, up)
            tl.store(target, hidden.to(HIDDEN.dtype.element_ty), mask=hidden_row < intermediate_size)
