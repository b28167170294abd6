"""`kernel_tiles`' int4 and mxfp4 products where tensor cores run while the next weights are widened (Gluon on Hopper).

In Triton-language a product whose weights come from registers is waited for before the next one is prepared, so that
tensor cores and arithmetic take turns. Here a step's four planes are four asynchronous products, and each is prepared
while the one before it runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from kimi_kernels.quantization.kernel_tiles import (
    INT4_ASM_0,
    INT4_ASM_1,
    INT4_ASM_2,
    INT4_ASM_3,
    MXFP4_ASM_0,
    MXFP4_ASM_1,
    MXFP4_ASM_2,
    MXFP4_ASM_3,
)

TILE_ROWS = gl.constexpr(128)
WORDS = gl.constexpr(32)
PLANE = gl.constexpr(32)
STEP = gl.constexpr(128)


@gluon.jit
def _widen(words, ASM: gl.constexpr):
    return gl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def scaled_plane(words, packed, P: gl.constexpr, KIND: gl.constexpr):
    """Weights of plane P, scaled: `kernel_tiles.int4_plane` with its scales, or `mxfp4_plane`."""
    if KIND == "mxfp4":
        ASM: gl.constexpr = MXFP4_ASM_0 if P == 0 else MXFP4_ASM_1 if P == 1 else MXFP4_ASM_2 if P == 2 else MXFP4_ASM_3
        bits = packed.to(gl.uint32, bitcast=True)
        if P > 1:
            bits = (bits >> 8) | (bits << 24)
        bits = (bits & 0x7F807F80) >> (16 * (P % 2))
    else:
        ASM: gl.constexpr = INT4_ASM_0 if P == 0 else INT4_ASM_1 if P == 1 else INT4_ASM_2 if P == 2 else INT4_ASM_3
        bits = packed >> (16 * P)
    return _widen(words, ASM) * bits.to(gl.uint16).to(gl.bfloat16, bitcast=True).expand_dims(1)


@gluon.jit
def _copy_step(tiles, scales, x, is_valid, words_buffer, scales_buffer, x_buffer, word, row, step, num_steps):
    """Start copying a step's words, scales and activations; past the last step, nothing."""
    is_step = step < num_steps
    async_copy.async_copy_global_to_shared(
        words_buffer, tiles + step * (TILE_ROWS * WORDS) + word, mask=is_step & (word >= 0)
    )
    async_copy.async_copy_global_to_shared(scales_buffer, scales + step * TILE_ROWS + row, mask=is_step & (row >= 0))
    for p in gl.static_range(4):
        async_copy.async_copy_global_to_shared(x_buffer[p], x + (step * STEP + p * PLANE), mask=is_step & is_valid)
    async_copy.commit_group()


@gluon.jit
def multiply_overlapped(
    tiles,
    scales,
    x_rows,
    is_valid,
    num_steps,
    KIND: gl.constexpr,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """(ROWS of the weight) x (activation rows): [ROWS, COLUMNS] float32. Columns that are not valid hold anything.

    Args:
        tiles, scales: the rows' first step. x_rows, is_valid: [COLUMNS], pointers to the rows' first elements.
        num_steps: a multiple of STAGES, at least STAGES.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    copy_scales: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    words_shared: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    x_shared: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    # A buffer a stage and plane, not one with an index: the compiler puts a barrier between accesses to one buffer.
    words_buffers = ()
    scales_buffers = ()
    x_buffers = ()
    for _ in gl.static_range(STAGES):
        words_buffers = words_buffers + (gl.allocate_shared_memory(gl.int16, [ROWS, WORDS], words_shared),)
        scales_buffers = scales_buffers + (
            gl.allocate_shared_memory(scales.dtype.element_ty, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        )
        x_buffers = x_buffers + (
            (
                gl.allocate_shared_memory(gl.bfloat16, [COLUMNS, PLANE], x_shared),
                gl.allocate_shared_memory(gl.bfloat16, [COLUMNS, PLANE], x_shared),
                gl.allocate_shared_memory(gl.bfloat16, [COLUMNS, PLANE], x_shared),
                gl.allocate_shared_memory(gl.bfloat16, [COLUMNS, PLANE], x_shared),
            ),
        )
    row = gl.arange(0, ROWS, gl.SliceLayout(1, copy)).expand_dims(1)
    plane_column = gl.arange(0, PLANE, gl.SliceLayout(0, copy)).expand_dims(0)
    word = row // TILE_ROWS * (num_steps * (TILE_ROWS * WORDS)) + row % TILE_ROWS * WORDS + plane_column
    scale_row = gl.arange(0, ROWS, copy_scales)
    scale_row = scale_row // TILE_ROWS * (num_steps * TILE_ROWS) + scale_row % TILE_ROWS
    x = x_rows.expand_dims(1) + plane_column
    is_valid = is_valid.expand_dims(1)
    for i in gl.static_range(STAGES - 2):
        _copy_step(
            tiles, scales, x, is_valid, words_buffers[i], scales_buffers[i], x_buffers[i], word, scale_row, i, num_steps
        )
    # Else a path around the loop would set the accumulators too, and ptxas would serialise the products.
    gl.assume(num_steps > 0)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, mma)
    for first in range(0, num_steps, STAGES):
        for i in gl.static_range(STAGES):
            async_copy.wait_group(STAGES - 3)
            gl.thread_barrier()
            # Of the step before, one product may still run; the one before that is done in all warps, its buffers free.
            _copy_step(
                tiles,
                scales,
                x,
                is_valid,
                words_buffers[(i + STAGES - 2) % STAGES],
                scales_buffers[(i + STAGES - 2) % STAGES],
                x_buffers[(i + STAGES - 2) % STAGES],
                word,
                scale_row,
                first + (i + STAGES - 2),
                num_steps,
            )
            words = words_buffers[i].load(weights_layout)
            packed = scales_buffers[i].load(gl.SliceLayout(1, weights_layout))
            for p in gl.static_range(4):
                weights = scaled_plane(words, packed, p, KIND)
                acc = warpgroup_mma(weights, x_buffers[i][p].permute((1, 0)), acc, is_async=True)
                # One product may still run, so its weights' registers must not be used again: they wait with it.
                acc, weights = warpgroup_mma_wait(1, deps=[acc, weights])
    acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    return acc
