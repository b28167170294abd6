"""Pieces of `attend_hopper_float8_kernel`: copies, conversions, result. Notation as there."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

BOX = gl.constexpr(64)  # keys and words of a box
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
def load_step(latents, rope_keys, table, begin, num_tiles, step, stage, boxes, rope_boxes, ready, W: gl.constexpr,
              PAGE: gl.constexpr, BOXES: gl.constexpr):  # fmt: skip
    """Start copying the keys of a step, if the segment has that many; an odd last tile is copied twice."""
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
                boxes.index((stage * (W // BOX) + chunk) * BOXES + box), pred=there,
            )  # fmt: skip
        tma.async_copy_global_to_shared(
            rope_keys, [row, W], ready.index(stage), rope_boxes.index(stage * BOXES + box), pred=there
        )


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
def widen_queries(q, row, num_used, q0, q1, rope0, rope1, L: gl.constexpr, P: gl.constexpr, R: gl.constexpr,
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
        buffer = q1 if half else q0
        rope_buffer = rope1 if half else rope0
        for chunk in gl.static_range(L // 128):
            values = _query_words(q, row, num_used, chunk * 128, half, 64, L + P, R, layout)
            buffer.slice(chunk * 64, 64, dim=1).store((values * inverse[:, None]).to(gl.float16))
        values = _query_words(q, row, num_used, L, half, P // 2, L + P, R, rope_layout)
        rope_buffer.store((values * rope_inverse[:, None]).to(gl.float16))
    return gl.convert_layout(unit, out_layout)


@gluon.jit
def store_columns(even, odd, factor, out, base, tile_row, exists, L: gl.constexpr, layout: gl.constexpr):
    """Write [L / 2, R] of even and of odd columns, each row times its factor."""
    even = even * factor[None, :]
    odd = odd * factor[None, :]
    place = ((base + tile_row) * (L // 2))[None, :] + gl.arange(0, L // 2, gl.SliceLayout(1, layout))[:, None]
    exists = exists[None, :] & (place >= 0)
    if out.dtype.element_ty == gl.float32:
        pairs = gl.inline_asm_elementwise(PACK_F32, "=l,r,r", [even, odd], dtype=gl.int64, is_pure=True, pack=1)
        gl.store(out.to(gl.pointer_type(gl.int64), bitcast=True) + place, pairs, mask=exists)
    else:
        if out.dtype.element_ty == gl.bfloat16:
            pairs = gl.inline_asm_elementwise(PACK_BF16, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
        else:
            pairs = gl.inline_asm_elementwise(PACK_F16, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
        gl.store(out.to(gl.pointer_type(gl.int32), bitcast=True) + place, pairs, mask=exists)
