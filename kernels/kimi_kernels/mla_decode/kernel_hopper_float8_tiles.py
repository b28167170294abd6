"""Pieces of `attend_hopper_kernel` for latents in float8: both products in float16, which holds float8 exactly.

Latents become float16 on their way from shared memory to the registers that the tensor cores take an operand from, so
that nothing is written back. They are read as words of two float8 columns; a word's two halves belong to two products:
of scores over columns (4 i, 4 i + 1) and (4 i + 2, 4 i + 3), of results for even and for odd columns. Rows are always
the products' second dimension. Notation as there; W = L / 2 words. Shared buffers go together: queries of the first and
the second product, their rope parts, the keys' boxes and rope boxes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kimi_kernels.mla_decode.kernel_hopper_segments import clear_unused

BOX = gl.constexpr(64)  # keys and words of a box
PV_KEYS = gl.constexpr(32)  # keys widened at a time for the second product
WIDEN_COLUMNS = gl.constexpr("""{
.reg .b16 a, b;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}""")  # words (row, 2 i) and (row, 2 i + 1): columns 4 i and 4 i + 1, columns 4 i + 2 and 4 i + 3
WIDEN_KEYS = gl.constexpr("""{
.reg .b32 t;
.reg .b16 a, b;
prmt.b32 t, $2, 0, 0x3120;
mov.b32 {a, b}, t;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}""")  # words of two keys: their even columns, their odd columns
PACK_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
PACK_F16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
PACK_F32 = gl.constexpr("mov.b64 $0, {$1, $2};")


@gluon.jit
def widen(words, ASM: gl.constexpr):
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def allocate(L: gl.constexpr, P: gl.constexpr, R: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr):
    W: gl.constexpr = L // 2
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    wide_half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    q0 = gl.allocate_shared_memory(gl.float16, [R, W], wide)
    q1 = gl.allocate_shared_memory(gl.float16, [R, W], wide)
    rope0 = gl.allocate_shared_memory(gl.float16, [R, P // 2], wide_half)
    rope1 = gl.allocate_shared_memory(gl.float16, [R, P // 2], wide_half)
    boxes = gl.allocate_shared_memory(gl.int16, [STAGES * (W // BOX) * BOXES, BOX, BOX], wide)
    rope_boxes = gl.allocate_shared_memory(gl.int16, [STAGES * BOXES, BOX, P // 2], wide_half)
    tiles = boxes._reinterpret(gl.int16, [STAGES, BOXES * BOX, W], wide)
    rope_tiles = rope_boxes._reinterpret(gl.int16, [STAGES, BOXES * BOX, P // 2], wide_half)
    return q0, q1, rope0, rope1, boxes, rope_boxes, tiles, rope_tiles


@gluon.jit
def load_step(latents, rope_keys, table, begin, num_tiles, step, stage, shared, ready, PAGE: gl.constexpr,
              BOXES: gl.constexpr):  # fmt: skip
    """Start copying the keys of a step, if the segment has that many; an odd last tile is copied twice."""
    W: gl.constexpr = shared[0].shape[1]
    there = step * BOXES < num_tiles
    mbarrier.expect(
        ready.index(stage),
        BOXES * (W // BOX * latents.block_type.nbytes + rope_keys.block_type.nbytes),
        pred=there,
    )
    for box in gl.static_range(BOXES):
        key = (begin + gl.minimum(step * BOXES + box, num_tiles - 1)) * BOX
        row = gl.load(table + key // PAGE, mask=there, other=0) * PAGE + key % PAGE
        for chunk in gl.static_range(W // BOX):
            tma.async_copy_global_to_shared(
                latents, [row, chunk * BOX], ready.index(stage),
                shared[4].index((stage * (W // BOX) + chunk) * BOXES + box), pred=there,
            )  # fmt: skip
        tma.async_copy_global_to_shared(
            rope_keys, [row, W], ready.index(stage), shared[5].index(stage * BOXES + box), pred=there
        )


@gluon.jit
def multiply_keys(shared, stage, num_used, layout: gl.constexpr, WARPS: gl.constexpr):
    """Queries . keys of a step, [K, R], after its tile was cleared past its `num_used` keys."""
    tile = shared[6].index(stage)
    K: gl.constexpr = tile.shape[0]
    W: gl.constexpr = tile.shape[1]
    R: gl.constexpr = shared[0].shape[0]
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    if num_used < K:
        clear_unused(tile, num_used, WARPS)
    scores = gl.zeros([K, R], gl.float32, layout)
    low, high = widen(shared[7].index(stage).load(operand), WIDEN_COLUMNS)
    scores = warpgroup_mma(low, shared[2].permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(high, shared[3].permute((1, 0)), scores, is_async=True)
    for chunk in gl.static_range(W // 64):
        old_low = low
        old_high = high
        low, high = widen(tile.slice(chunk * 64, 64, dim=1).load(operand), WIDEN_COLUMNS)
        scores, old_low, old_high = warpgroup_mma_wait(0, deps=[scores, old_low, old_high])
        scores = warpgroup_mma(low, shared[0].slice(chunk * 64, 64, dim=1).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma(high, shared[1].slice(chunk * 64, 64, dim=1).permute((1, 0)), scores, is_async=True)
    scores, low, high = warpgroup_mma_wait(0, deps=[scores, low, high])
    return scores


@gluon.jit
def multiply_values(shared, stage, weights, even, odd, latents, rope_keys, table, begin, num_tiles, next_step, ready,
                    layout: gl.constexpr, PAGE: gl.constexpr, BOXES: gl.constexpr):  # fmt: skip
    """Add weights . values to the even and the odd columns; start copying the step that follows once all is read."""
    tile = shared[6].index(stage)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    low, high = widen(tile.slice(0, PV_KEYS, dim=0).permute((1, 0)).load(operand), WIDEN_KEYS)
    even = warpgroup_mma(low, weights.slice(0, PV_KEYS, dim=0), even, is_async=True)
    odd = warpgroup_mma(high, weights.slice(0, PV_KEYS, dim=0), odd, is_async=True)
    for chunk in gl.static_range(1, BOXES * BOX // PV_KEYS):
        old_low = low
        old_high = high
        low, high = widen(tile.slice(chunk * PV_KEYS, PV_KEYS, dim=0).permute((1, 0)).load(operand), WIDEN_KEYS)
        even, odd, old_low, old_high = warpgroup_mma_wait(0, deps=[even, odd, old_low, old_high])
        even = warpgroup_mma(low, weights.slice(chunk * PV_KEYS, PV_KEYS, dim=0), even, is_async=True)
        odd = warpgroup_mma(high, weights.slice(chunk * PV_KEYS, PV_KEYS, dim=0), odd, is_async=True)
    gl.thread_barrier()  # every warp has read this tile
    load_step(latents, rope_keys, table, begin, num_tiles, next_step, stage, shared, ready, PAGE, BOXES)
    even, odd, low, high = warpgroup_mma_wait(0, deps=[even, odd, low, high])
    return even, odd


@gluon.jit
def _query_words(q, row, num_used, FIRST: gl.constexpr, HALF: gl.constexpr, WIDTH: gl.constexpr, ROW: gl.constexpr,
                 R: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """[R, WIDTH] float32: columns (4 i, 4 i + 1) + 2 HALF of 2 WIDTH from FIRST on."""
    index = gl.arange(0, R, gl.SliceLayout(1, layout))
    at = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    column = FIRST + at // 2 * 4 + at % 2 + 2 * HALF
    place = (index * ROW)[:, None] + column[None, :]
    return gl.load(q + row.to(gl.int64) * ROW + place, mask=(index < num_used)[:, None], other=0.0).to(gl.float32)


@gluon.jit
def widen_queries(q, row, num_used, shared, L: gl.constexpr, P: gl.constexpr, R: gl.constexpr,
                  WARPS: gl.constexpr, out_layout: gl.constexpr):  # fmt: skip
    """Queries to shared memory in float16, in the order of the products, each row divided by a power of two.

    Returns [R] float32: that power.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    rope_row: gl.constexpr = gl.SliceLayout(1, rope_layout)
    largest = gl.full([R], 1e-30, gl.float32, gl.SliceLayout(1, layout))
    rope_largest = gl.full([R], 1e-30, gl.float32, rope_row)
    for half in gl.static_range(2):
        for chunk in gl.static_range(L // 128):
            values = _query_words(q, row, num_used, chunk * 128, half, 64, L + P, R, layout)
            largest = gl.maximum(largest, gl.max(gl.abs(values), 1))
        values = _query_words(q, row, num_used, L, half, P // 2, L + P, R, rope_layout)
        rope_largest = gl.maximum(rope_largest, gl.max(gl.abs(values), 1))
    largest = gl.maximum(largest, gl.convert_layout(rope_largest, largest.type.layout))
    unit = (largest.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True) * (1.0 / 256)
    inverse = 1.0 / unit
    rope_inverse = gl.convert_layout(inverse, rope_row)
    for half in gl.static_range(2):
        for chunk in gl.static_range(L // 128):
            values = _query_words(q, row, num_used, chunk * 128, half, 64, L + P, R, layout)
            shared[half].slice(chunk * 64, 64, dim=1).store((values * inverse[:, None]).to(gl.float16))
        values = _query_words(q, row, num_used, L, half, P // 2, L + P, R, rope_layout)
        shared[2 + half].store((values * rope_inverse[:, None]).to(gl.float16))
    return gl.convert_layout(unit, out_layout)


@gluon.jit
def store_columns(even, odd, out, place, exists):
    """Write even and odd columns as pairs; places count pairs."""
    exists = exists & (place >= 0)
    if out.dtype.element_ty == gl.float32:
        pairs = gl.inline_asm_elementwise(PACK_F32, "=l,r,r", [even, odd], dtype=gl.int64, is_pure=True, pack=1)
        gl.store(out.to(gl.pointer_type(gl.int64), bitcast=True) + place, pairs, mask=exists)
    else:
        if out.dtype.element_ty == gl.bfloat16:
            pairs = gl.inline_asm_elementwise(PACK_BF16, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
        else:
            pairs = gl.inline_asm_elementwise(PACK_F16, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
        gl.store(out.to(gl.pointer_type(gl.int32), bitcast=True) + place, pairs, mask=exists)
