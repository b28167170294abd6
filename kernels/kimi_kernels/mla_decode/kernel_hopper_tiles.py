"""Pieces of `attend_hopper_kernel`: loads, conversions and products of one tile. Notation as in kernel_attend.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

RECORD = gl.constexpr(16)


@gluon.jit
def load_first(latents, rope_keys, row, half, rope, ready, L: gl.constexpr, there):
    """Start copying the first half of a tile's columns and its rope part."""
    mbarrier.expect(ready, latents.block_type.nbytes + rope_keys.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(latents, [row, 0], ready, half, pred=there)
    tma.async_copy_global_to_shared(rope_keys, [row, L], ready, rope, pred=there)


@gluon.jit
def load_second(latents, row, half, ready, H: gl.constexpr, there):
    """Start copying the second half."""
    mbarrier.expect(ready, latents.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(latents, [row, H], ready, half, pred=there)


@gluon.jit
def load_tile(latents, rope_keys, table, begin, num_tiles, ahead, done, k1_shared, k2_shared, kr_shared, ready1, ready2,
              L: gl.constexpr, PAGE: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Start copying tile `ahead` of a segment, if it has that many, to the buffer that it falls to."""
    there = ahead < num_tiles
    key = (begin + ahead) * K
    row = gl.load(table + key // PAGE, mask=there, other=0) * PAGE + key % PAGE
    stage = (done + ahead) % STAGES
    load_first(latents, rope_keys, row, k1_shared.index(stage), kr_shared.index(stage), ready1.index(stage), L, there)
    load_second(latents, row, k2_shared.index(stage), ready2.index(stage), L // 2, there)


@gluon.jit
def load_queries(queries, rope_queries, row, q1, q2, qr, ready, L: gl.constexpr, there):
    """Start copying a tile of query rows."""
    mbarrier.expect(ready, 2 * queries.block_type.nbytes + rope_queries.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(queries, [row, 0], ready, q1, pred=there)
    tma.async_copy_global_to_shared(queries, [row, L // 2], ready, q2, pred=there)
    tma.async_copy_global_to_shared(rope_queries, [row, L], ready, qr, pred=there)


@gluon.jit
def read_segment(records, at, member, num_heads, R: gl.constexpr, K: gl.constexpr):
    """(sequence, first query row, query rows, first packed row of this tile, first key tile, key tiles, slot, length)
    of a record, for one member of the team."""
    record = records + at * RECORD
    num_rows = gl.load(record + 2)
    tile_start = (gl.load(record + 3) + member) * R
    begin = gl.load(record + 4)
    length = gl.load(record + 7)
    # The last row of the tile sees most keys.
    last_token = gl.minimum((tile_start + R - 1) // num_heads, num_rows - 1)
    end = gl.minimum(gl.load(record + 5), gl.cdiv(length - num_rows + last_token + 1, K))
    num_tiles = gl.where(tile_start < num_rows * num_heads, gl.maximum(end - begin, 0), 0)
    return gl.load(record), gl.load(record + 1), num_rows, tile_start, begin, num_tiles, gl.load(record + 6), length


@gluon.jit
def clear_unused(half, num_used, WARPS: gl.constexpr):
    """Zero the rows of a tile past the end of its sequence: 0 * NaN would spoil the values."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    used = gl.arange(0, half.shape[0], gl.SliceLayout(1, layout)) < num_used
    for chunk in gl.static_range(half.shape[1] // 64):
        part = half.slice(chunk * 64, 64, dim=1)
        values = part.load(layout)
        part.store(gl.where(used[:, None], values, gl.zeros_like(values)))


@gluon.jit
def widen(raw, wide, WARPS: gl.constexpr):
    """Copy float8 rows [64, H] to float16, which holds them exactly.

    A thread takes 16 columns. Rows of the lanes are spread so that neither the reads (16 bytes) nor the writes (twice
    16) of eight lanes meet in a bank of the two swizzled layouts.
    """
    if WARPS == 4:
        layout: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [32, 0], [0, 64]],
            lane_bases=[[0, 16], [0, 32], [5, 0], [1, 0], [2, 0]],
            warp_bases=[[8, 0], [16, 0]],
            block_bases=[],
            shape=[64, 128],
        )
    else:
        layout: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 64]],
            lane_bases=[[0, 16], [0, 32], [5, 0], [1, 0], [2, 0]],
            warp_bases=[[8, 0], [16, 0], [32, 0]],
            block_bases=[],
            shape=[64, 128],
        )
    for chunk in gl.static_range(raw.shape[1] // 128):
        values = raw.slice(chunk * 128, 128, dim=1).load(layout)
        wide.slice(chunk * 128, 128, dim=1).store(values.to(wide.dtype))


@gluon.jit
def _query_chunk(q, row, num_used, FIRST: gl.constexpr, ROW: gl.constexpr, R: gl.constexpr, layout: gl.constexpr,
                  COLUMNS: gl.constexpr):  # fmt: skip
    index = gl.arange(0, R, gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    first = q + row.to(gl.int64) * ROW + FIRST
    place = index[:, None] * ROW + column[None, :]
    return gl.load(first + place, mask=(index < num_used)[:, None], other=0.0).to(gl.float32)


@gluon.jit
def _store_split(values, high, low):
    """float32 values of size up to 448 as high + low / 16, both float8: eight bits of mantissa together."""
    rounded = values.to(high.dtype)
    high.store(rounded)
    low.store(((values - rounded.to(gl.float32)) * 16.0).to(low.dtype))


@gluon.jit
def split_queries(q, row, num_used, high1, high2, high_rope, low1, low2, low_rope, L: gl.constexpr, P: gl.constexpr,
                  R: gl.constexpr, WARPS: gl.constexpr, out_layout: gl.constexpr):  # fmt: skip
    """Queries to shared memory as two float8 tensors each, so that float8 keys need no widening.

    Returns [R] float32: what row r's queries were divided by.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [WARPS, 1], [1, 0])
    H: gl.constexpr = L // 2
    rope = _query_chunk(q, row, num_used, L, L + P, R, rope_layout, P)
    largest = gl.convert_layout(gl.max(gl.abs(rope), 1), gl.SliceLayout(1, layout))
    for chunk in gl.static_range(L // 128):
        values = _query_chunk(q, row, num_used, chunk * 128, L + P, R, layout, 128)
        largest = gl.maximum(largest, gl.max(gl.abs(values), 1))
    unit = gl.maximum(largest, 1e-30) / 448.0
    inverse = (1.0 / unit)[:, None]
    for chunk in gl.static_range(H // 128):
        values = _query_chunk(q, row, num_used, chunk * 128, L + P, R, layout, 128) * inverse
        _store_split(values, high1.slice(chunk * 128, 128, dim=1), low1.slice(chunk * 128, 128, dim=1))
        values = _query_chunk(q, row, num_used, H + chunk * 128, L + P, R, layout, 128) * inverse
        _store_split(values, high2.slice(chunk * 128, 128, dim=1), low2.slice(chunk * 128, 128, dim=1))
    rope = rope * gl.convert_layout(1.0 / unit, gl.SliceLayout(1, rope_layout))[:, None]
    _store_split(rope, high_rope, low_rope)
    return gl.convert_layout(unit, out_layout)


@gluon.jit
def multiply(queries, keys, scores, FRESH: gl.constexpr, SWAP: gl.constexpr):
    """scores += queries . keys over some columns, not waited for: [R, K], or [K, R] if SWAP."""
    if SWAP:
        return warpgroup_mma(keys, queries.permute((1, 0)), scores, use_acc=not FRESH, is_async=True)
    else:
        return warpgroup_mma(queries, keys.permute((1, 0)), scores, use_acc=not FRESH, is_async=True)


@gluon.jit
def accumulate(weights, values, acc, SWAP: gl.constexpr):
    """acc += weights . values over some columns, not waited for: [R, H], or [H, R] if SWAP."""
    if SWAP:
        return warpgroup_mma(values.permute((1, 0)), weights, acc, is_async=True)
    else:
        return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def store_half(acc, factor, out, base, tile_row, exists, FIRST: gl.constexpr, L: gl.constexpr,
                key_axis: gl.constexpr, row_axis: gl.constexpr, out_column: gl.constexpr):  # fmt: skip
    H: gl.constexpr = L // 2
    column = FIRST + gl.expand_dims(gl.arange(0, H, out_column), row_axis)
    place = gl.expand_dims(base + tile_row, key_axis) * L + column
    values = acc * gl.expand_dims(factor, key_axis)
    gl.store(out + place, values.to(out.dtype.element_ty), mask=gl.expand_dims(exists, key_axis))
