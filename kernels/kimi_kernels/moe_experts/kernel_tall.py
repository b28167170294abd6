"""Products of many choices an expert: tensor cores run while the next weights are dequantised (Gluon, Hopper only).

In Triton-language a product whose weights come from registers is waited for before the next one is prepared, so that
tensor cores and arithmetic take turns. Here a step's four planes are four asynchronous products, and each is prepared
while the one before it runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from kimi_kernels.moe_experts.kernel_align import TILE_COUNT_SHIFT
from kimi_kernels.quantization.kernel_tiles import INT4_ASM_0, INT4_ASM_1, INT4_ASM_2, INT4_ASM_3

TILE_ROWS = gl.constexpr(128)
WORDS = gl.constexpr(32)
PLANE = gl.constexpr(32)
STEP = gl.constexpr(128)
STRIPE = gl.constexpr(8)
HALF = gl.constexpr(64)


@gluon.jit
def _int4_plane(words, P: gl.constexpr):
    if P == 0:
        values = gl.inline_asm_elementwise(INT4_ASM_0, "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)
    elif P == 1:
        values = gl.inline_asm_elementwise(INT4_ASM_1, "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)
    elif P == 2:
        values = gl.inline_asm_elementwise(INT4_ASM_2, "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        values = gl.inline_asm_elementwise(INT4_ASM_3, "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)
    return values


@gluon.jit
def _copy_step(tiles, scales, x, is_valid, words_buffer, scales_buffer, x_buffers, slot, word, row, step):
    """Start copying a step's words, scales and activations into a slot of the buffers."""
    async_copy.async_copy_global_to_shared(words_buffer.index(slot), tiles + step * (TILE_ROWS * WORDS) + word)
    async_copy.async_copy_global_to_shared(scales_buffer.index(slot), scales + step * TILE_ROWS + row)
    for p in gl.static_range(4):
        async_copy.async_copy_global_to_shared(
            x_buffers[p].index(slot), x + (step * STEP + p * PLANE), mask=is_valid
        )
    async_copy.commit_group()


@gluon.jit
def _multiply(tiles, scales, x_rows, is_valid, num_steps, COLUMNS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr):
    """(row tile of the weight) x (activation rows): [128, COLUMNS] float32. Columns that are not valid hold anything.

    Args:
        tiles, scales: the row tile's first step. x_rows, is_valid: [COLUMNS], pointers to the rows' first elements.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    copy_scales: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    x_shared: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    words_buffer = gl.allocate_shared_memory(
        gl.int16, [STAGES, TILE_ROWS, WORDS], gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    )
    scales_buffer = gl.allocate_shared_memory(gl.int64, [STAGES, TILE_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Four buffers, not one of four planes: the compiler puts a barrier between copies into one buffer.
    x_buffers = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, PLANE], x_shared),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, PLANE], x_shared),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, PLANE], x_shared),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, PLANE], x_shared),
    )
    row = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, copy)).expand_dims(1)
    plane_column = gl.arange(0, PLANE, gl.SliceLayout(0, copy)).expand_dims(0)
    word = row * WORDS + plane_column
    scale_row = gl.arange(0, TILE_ROWS, copy_scales)
    x = x_rows.expand_dims(1) + plane_column
    is_valid = is_valid.expand_dims(1)
    for step in gl.static_range(STAGES - 1):
        _copy_step(
            tiles,
            scales,
            x,
            is_valid & (step < num_steps),
            words_buffer,
            scales_buffer,
            x_buffers,
            step,
            word,
            scale_row,
            gl.minimum(step, num_steps - 1),
        )
    # Else a path around the loop would set the accumulators too, and ptxas would serialise the products.
    gl.assume(num_steps > 0)
    acc = gl.zeros([TILE_ROWS, COLUMNS], gl.float32, mma)
    slot = 0
    for step in range(num_steps):
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()
        words = words_buffer.index(slot).load(weights_layout)
        packed = scales_buffer.index(slot).load(gl.SliceLayout(1, weights_layout))
        for p in gl.static_range(4):
            # A bf16 is the upper half of the float32 of the same value.
            scale = ((packed >> (16 * p)).to(gl.int32) << 16).to(gl.float32, bitcast=True).to(gl.bfloat16)
            weights = _int4_plane(words, p) * scale.expand_dims(1)
            acc = warpgroup_mma(weights, x_buffers[p].index(slot).permute((1, 0)), acc, is_async=True)
            # One product may still run, so its weights' registers must not be used again: they wait with it.
            acc, weights = warpgroup_mma_wait(1, deps=[acc, weights])
            if p == 0:
                # All products of the step before are done, in both warpgroups: its slot is free.
                gl.thread_barrier()
                ahead = step + (STAGES - 1)
                _copy_step(
                    tiles,
                    scales,
                    x,
                    is_valid & (ahead < num_steps),
                    words_buffer,
                    scales_buffer,
                    x_buffers,
                    (slot + (STAGES - 1)) % STAGES,
                    word,
                    scale_row,
                    gl.minimum(ahead, num_steps - 1),
                )
        slot = (slot + 1) % STAGES
    acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    return acc


@gluon.jit
def _load_choices(TILE_CHOICES, tile, count, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """A tile's choices and which of its columns hold one."""
    column = gl.arange(0, COLUMNS, layout)
    is_valid = column < count
    return gl.load(TILE_CHOICES + tile + column, mask=is_valid, other=0).to(gl.int64), is_valid


@gluon.jit
def _gate_up_tile(
    X,
    tiles,
    scales,
    HIDDEN,
    choices,
    count,
    x_stride,
    top_k,
    intermediate_size,
    row_tile,
    num_steps,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    copy: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0]))
    choice, is_valid = _load_choices(choices, 0, count, COLUMNS, copy)
    acc = _multiply(tiles, scales, X + choice // top_k * x_stride, is_valid, num_steps, COLUMNS, STAGES, WARPS)
    gate, up = acc.reshape([STRIPE, 2, STRIPE, COLUMNS]).permute((0, 2, 3, 1)).split()
    hidden = (gate / (1.0 + gl.exp(-gate)) * up).reshape([HALF, COLUMNS])
    store: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    hidden = gl.convert_layout(hidden.to(HIDDEN.dtype.element_ty), store)
    choice, is_valid = _load_choices(choices, 0, count, COLUMNS, gl.SliceLayout(0, store))
    row = row_tile * HALF + gl.arange(0, HALF, gl.SliceLayout(1, store))
    target = HIDDEN + choice.expand_dims(0) * intermediate_size + row.expand_dims(1)
    gl.store(target, hidden, mask=is_valid.expand_dims(0) & (row < intermediate_size).expand_dims(1))


@gluon.jit
def gate_up_tall_kernel(
    X,
    TILES,
    SCALES,
    HIDDEN,
    TILE_ENTRIES,
    TILE_CHOICES,
    NUM_TILES,
    x_stride,
    top_k,
    intermediate_size,
    num_row_tiles,
    num_steps,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """`gate_up_sorted_kernel` for int4 and whole steps; a tile that is at most half full takes half the columns."""
    program = gl.program_id(0)
    row_tile = program % num_row_tiles
    tile = program // num_row_tiles
    if tile >= gl.load(NUM_TILES):
        return
    entry = gl.load(TILE_ENTRIES + tile)
    count = entry >> TILE_COUNT_SHIFT
    matrix = (entry & 0xFFFF).to(gl.int64) * num_row_tiles + row_tile
    tiles = TILES + matrix * num_steps * (TILE_ROWS * WORDS)
    scales = SCALES + matrix * num_steps * TILE_ROWS
    choices = TILE_CHOICES + tile * COLUMNS
    if count > COLUMNS // 2:
        _gate_up_tile(
            X,
            tiles,
            scales,
            HIDDEN,
            choices,
            count,
            x_stride,
            top_k,
            intermediate_size,
            row_tile,
            num_steps,
            COLUMNS,
            STAGES,
            WARPS,
        )
    else:
        _gate_up_tile(
            X,
            tiles,
            scales,
            HIDDEN,
            choices,
            count,
            x_stride,
            top_k,
            intermediate_size,
            row_tile,
            num_steps,
            COLUMNS // 2,
            STAGES,
            WARPS,
        )


@gluon.jit
def _down_tile(
    HIDDEN,
    tiles,
    scales,
    OUT,
    choices,
    count,
    intermediate_size,
    out_features,
    row_tile,
    num_steps,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    copy: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0]))
    choice, is_valid = _load_choices(choices, 0, count, COLUMNS, copy)
    acc = _multiply(tiles, scales, HIDDEN + choice * intermediate_size, is_valid, num_steps, COLUMNS, STAGES, WARPS)
    store: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, WARPS], [0, 1])
    product = gl.convert_layout(acc, store).to(OUT.dtype.element_ty)
    choice, is_valid = _load_choices(choices, 0, count, COLUMNS, gl.SliceLayout(0, store))
    row = row_tile * TILE_ROWS + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, store))
    target = OUT + choice.expand_dims(0) * out_features + row.expand_dims(1)
    gl.store(target, product, mask=is_valid.expand_dims(0) & (row < out_features).expand_dims(1))


@gluon.jit
def down_tall_kernel(
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
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """`down_sorted_kernel` for int4 and whole steps; a tile that is at most half full takes half the columns."""
    program = gl.program_id(0)
    row_tile = program % num_row_tiles
    tile = program // num_row_tiles
    if tile >= gl.load(NUM_TILES):
        return
    entry = gl.load(TILE_ENTRIES + tile)
    count = entry >> TILE_COUNT_SHIFT
    matrix = (entry & 0xFFFF).to(gl.int64) * num_row_tiles + row_tile
    tiles = TILES + matrix * num_steps * (TILE_ROWS * WORDS)
    scales = SCALES + matrix * num_steps * TILE_ROWS
    choices = TILE_CHOICES + tile * COLUMNS
    if count > COLUMNS // 2:
        _down_tile(
            HIDDEN,
            tiles,
            scales,
            OUT,
            choices,
            count,
            intermediate_size,
            out_features,
            row_tile,
            num_steps,
            COLUMNS,
            STAGES,
            WARPS,
        )
    else:
        _down_tile(
            HIDDEN,
            tiles,
            scales,
            OUT,
            choices,
            count,
            intermediate_size,
            out_features,
            row_tile,
            num_steps,
            COLUMNS // 2,
            STAGES,
            WARPS,
        )
