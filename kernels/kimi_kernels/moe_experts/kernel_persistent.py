"""One of the experts' two products for many assignments an expert (Gluon, Hopper only): persistent thread blocks.

Eight warps multiply a row tile of the weight with up to 192 assignments at once, so that a weight is read and widened
once for all of them. Four more warps gather weights and activations, step after step, from one tile into the next.
Activations come in whole lines of 128 bytes, two planes together: half lines took a third longer (the second product).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kimi_kernels.moe_experts.kernel_align import TILE_COUNT_SHIFT
from kimi_kernels.moe_experts.kernel_tall import STRIPE, load_assignments
from kimi_kernels.quantization.kernel_overlapped import PLANE, STEP, TILE_ROWS, WORDS, scaled_plane

MOST_FIRST = gl.constexpr(128)
MOST_SECOND = gl.constexpr(64)
"""Assignments of a tile: a first product takes some of them, a second the rest, as a product's width is a power of
two."""
PAIR = gl.constexpr(64)
"""Columns of two planes: a line of memory."""
MULTIPLYING_WARPS = gl.constexpr(8)
LOADING_WARPS = gl.constexpr(4)


@gluon.jit
def _by_width(steps: gl.constexpr, count, given, constants):
    """Run `_load_steps` or `_multiply_steps` for the narrowest tile that holds `count` assignments."""
    if count > 160:
        steps(*given, 128, 64, *constants)
    elif count > 128:
        steps(*given, 128, 32, *constants)
    elif count > 96:
        steps(*given, 128, 0, *constants)
    elif count > 64:
        steps(*given, 64, 32, *constants)
    else:
        steps(*given, 0, 64, *constants)


@gluon.jit
def _load_steps(
    X, tiles, scales, assignments, count, buffers, ready, free, x_stride, top_k, loaded, num_steps,
    FIRST: gl.constexpr, SECOND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the steps of a row tile and of FIRST + SECOND assignments into buffers as they become free."""
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [LOADING_WARPS, 1], [1, 0])
    copy_x: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [LOADING_WARPS, 1], [1, 0])
    copy_scales: gl.constexpr = gl.BlockedLayout([1], [32], [LOADING_WARPS], [0])
    words, packed, first_x, second_x = buffers
    x_column = gl.arange(0, PAIR, gl.SliceLayout(0, copy_x)).expand_dims(0)
    word_column = gl.arange(0, WORDS, gl.SliceLayout(0, copy)).expand_dims(0)
    word = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, copy)).expand_dims(1) * WORDS + word_column
    row = gl.arange(0, TILE_ROWS, copy_scales)
    if FIRST > 0:
        assignment, is_valid = load_assignments(assignments, 0, count, FIRST, gl.SliceLayout(1, copy_x))
        first_rows = (X + assignment // top_k * x_stride).expand_dims(1) + x_column
        first_valid = is_valid.expand_dims(1)
    if SECOND > 0:
        assignment, is_valid = load_assignments(assignments, FIRST, count, SECOND, gl.SliceLayout(1, copy_x))
        second_rows = (X + assignment // top_k * x_stride).expand_dims(1) + x_column
        second_valid = is_valid.expand_dims(1)
    for step in range(num_steps):
        stage = (loaded + step) % STAGES
        mbarrier.wait(free.index(stage), ((loaded + step) // STAGES & 1) ^ 1)
        async_copy.async_copy_global_to_shared(words.index(stage), tiles + step * (TILE_ROWS * WORDS) + word)
        async_copy.async_copy_global_to_shared(packed.index(stage), scales + step * TILE_ROWS + row)
        for pair in gl.static_range(2):
            buffer = stage * 2 + pair
            column = step * STEP + pair * PAIR
            if FIRST > 0:
                x = first_x.index(buffer).slice(0, FIRST, dim=0)
                async_copy.async_copy_global_to_shared(x, first_rows + column, mask=first_valid)
            if SECOND > 0:
                x = second_x.index(buffer).slice(0, SECOND, dim=0)
                async_copy.async_copy_global_to_shared(x, second_rows + column, mask=second_valid)
        async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)


@gluon.jit
def _load(
    X, TILES, SCALES, TILE_ENTRIES, TILE_ASSIGNMENTS, buffers, ready, free, x_stride, top_k, num_row_tiles, num_steps,
    num_items, STAGES: gl.constexpr,
):  # fmt: skip
    loaded = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = item // num_row_tiles
        entry = gl.load(TILE_ENTRIES + tile)
        count = entry >> TILE_COUNT_SHIFT
        matrix = (entry & 0xFFFF).to(gl.int64) * num_row_tiles + item % num_row_tiles
        tiles = TILES + matrix * num_steps * (TILE_ROWS * WORDS)
        scales = SCALES + matrix * num_steps * TILE_ROWS
        assignments = TILE_ASSIGNMENTS + tile * (MOST_FIRST + MOST_SECOND)
        given = X, tiles, scales, assignments, count, buffers, ready, free, x_stride, top_k, loaded, num_steps
        _by_width(_load_steps, count, given, (STAGES,))
        loaded += num_steps


@gluon.jit
def _store(OUT, acc, assignments, first, count, row_tile, out_features, ACTIVATE: gl.constexpr, WIDTH: gl.constexpr):
    if ACTIVATE:
        gate, up = acc.reshape([TILE_ROWS // (2 * STRIPE), 2, STRIPE, WIDTH]).permute((0, 2, 3, 1)).split()
        values = (gate / (1.0 + gl.exp(-gate)) * up).reshape([TILE_ROWS // 2, WIDTH])
        OUT_ROWS: gl.constexpr = TILE_ROWS // 2
    else:
        values = acc
        OUT_ROWS: gl.constexpr = TILE_ROWS
    store: gl.constexpr = gl.BlockedLayout([8, 1], [OUT_ROWS // 8, 256 // OUT_ROWS], [1, MULTIPLYING_WARPS], [0, 1])
    assignment, is_valid = load_assignments(assignments, first, count, WIDTH, gl.SliceLayout(0, store))
    values = gl.convert_layout(values.to(OUT.dtype.element_ty), store)
    row = row_tile * OUT_ROWS + gl.arange(0, OUT_ROWS, gl.SliceLayout(1, store))
    target = OUT + assignment.expand_dims(0) * out_features + row.expand_dims(1)
    gl.store(target, values, mask=is_valid.expand_dims(0) & (row < out_features).expand_dims(1))


@gluon.jit
def _plane_of(buffers, stage, P: gl.constexpr, WIDTH: gl.constexpr):
    """Plane P of a step's activations: [PLANE, WIDTH]."""
    pair = buffers.index(stage * 2 + P // 2).slice(0, WIDTH, dim=0)
    return pair.slice(P % 2 * PLANE, PLANE, dim=1).permute((1, 0))


@gluon.jit
def _multiply_steps(
    OUT, assignments, count, buffers, ready, free, loaded, num_steps, row_tile, out_features,
    FIRST: gl.constexpr, SECOND: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, ACTIVATE: gl.constexpr,
):  # fmt: skip
    """A row tile of the weight x FIRST + SECOND assignments."""
    WIDTH: gl.constexpr = FIRST if FIRST > 0 else SECOND
    first_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [MULTIPLYING_WARPS, 1], [16, WIDTH, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, first_mma, 2)
    words_buffers, packed_buffers, first_x, second_x = buffers
    # Else a path around the loop would set the accumulators too, and ptxas would serialise the products.
    gl.assume(num_steps > 0)
    if FIRST > 0:
        acc = gl.zeros([TILE_ROWS, FIRST], gl.float32, first_mma)
    if SECOND > 0:
        second_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [MULTIPLYING_WARPS, 1], [16, SECOND, 16])
        second_operand: gl.constexpr = gl.DotOperandLayout(0, second_mma, 2)
        more = gl.zeros([TILE_ROWS, SECOND], gl.float32, second_mma)
    for step in range(num_steps):
        stage = (loaded + step) % STAGES
        mbarrier.wait(ready.index(stage), (loaded + step) // STAGES & 1)
        fence_async_shared()
        words = words_buffers.index(stage).load(operand)
        packed = packed_buffers.index(stage).load(gl.SliceLayout(1, operand))
        for p in gl.static_range(4):
            weights = scaled_plane(words, packed, p, KIND)
            if FIRST > 0:
                x = _plane_of(first_x, stage, p, FIRST)
                acc = warpgroup_mma(weights, x, acc, is_async=True)
            if SECOND > 0:
                x = _plane_of(second_x, stage, p, SECOND)
                same = gl.convert_layout(weights, second_operand, True)
                more = warpgroup_mma(same, x, more, is_async=True)
            # A plane's products may still run, so its weights' registers must not be used again: they wait with them.
            if FIRST > 0 and SECOND > 0:
                acc, more, weights = warpgroup_mma_wait(2, deps=[acc, more, weights])
            elif FIRST > 0:
                acc, weights = warpgroup_mma_wait(1, deps=[acc, weights])
            else:
                more, weights = warpgroup_mma_wait(1, deps=[more, weights])
            if p == 0:
                # All products of the step before are done.
                mbarrier.arrive(free.index((loaded + step + (STAGES - 1)) % STAGES), count=1, pred=step > 0)
    if FIRST > 0 and SECOND > 0:
        acc, more = warpgroup_mma_wait(0, deps=[acc, more])
    elif FIRST > 0:
        acc = warpgroup_mma_wait(0, deps=[acc])
    else:
        more = warpgroup_mma_wait(0, deps=[more])
    mbarrier.arrive(free.index((loaded + num_steps + (STAGES - 1)) % STAGES), count=1)
    if FIRST > 0:
        _store(OUT, acc, assignments, 0, count, row_tile, out_features, ACTIVATE, FIRST)
    if SECOND > 0:
        _store(OUT, more, assignments, FIRST, count, row_tile, out_features, ACTIVATE, SECOND)


@gluon.jit
def _multiply(
    OUT, TILE_ENTRIES, TILE_ASSIGNMENTS, buffers, ready, free, out_features, num_row_tiles, num_steps, num_items,
    KIND: gl.constexpr, ACTIVATE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    loaded = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = item // num_row_tiles
        row_tile = item % num_row_tiles
        count = gl.load(TILE_ENTRIES + tile) >> TILE_COUNT_SHIFT
        assignments = TILE_ASSIGNMENTS + tile * (MOST_FIRST + MOST_SECOND)
        given = OUT, assignments, count, buffers, ready, free, loaded, num_steps, row_tile, out_features
        _by_width(_multiply_steps, count, given, (STAGES, KIND, ACTIVATE))
        loaded += num_steps


@gluon.jit
def multiply_persistent_kernel(
    X,
    TILES,
    SCALES,
    OUT,
    TILE_ENTRIES,
    TILE_ASSIGNMENTS,
    NUM_TILES,
    x_stride,
    top_k,
    out_features,
    num_row_tiles,
    num_steps,
    KIND: gl.constexpr,
    ACTIVATE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Rows of X x the weights of their experts; a grid of at most as many programs as multiprocessors.

    Args:
        X: [rows, in_features], row = assignment // top_k. TILES, SCALES: of whole steps. OUT: [assignments,
            out_features].
        ACTIVATE: of the first product, whose gate and up rows come in stripes: silu(gate) * up.
        TILE_ENTRIES, TILE_ASSIGNMENTS, NUM_TILES: as `place_kernel` writes them, in tiles of 192 assignments.
    """
    words_shared: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    scales_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    buffers = (
        gl.allocate_shared_memory(gl.int16, [STAGES, TILE_ROWS, WORDS], words_shared),
        gl.allocate_shared_memory(SCALES.dtype.element_ty, [STAGES, TILE_ROWS], scales_shared),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, MOST_FIRST, PAIR], x_shared),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, MOST_SECOND, PAIR], x_shared),
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=LOADING_WARPS * 32)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    num_items = gl.load(NUM_TILES) * num_row_tiles
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    OUT, TILE_ENTRIES, TILE_ASSIGNMENTS, buffers, ready, free, out_features, num_row_tiles, num_steps,
                    num_items, KIND, ACTIVATE, STAGES,
                ),
            ),
            (
                _load,
                (
                    X, TILES, SCALES, TILE_ENTRIES, TILE_ASSIGNMENTS, buffers, ready, free, x_stride, top_k,
                    num_row_tiles, num_steps, num_items, STAGES,
                ),
            ),
        ],
        [LOADING_WARPS],
        [80],
    )  # fmt: skip
