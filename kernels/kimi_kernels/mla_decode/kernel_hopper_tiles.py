"""Pieces of the Hopper kernels: loads and products of one tile. Notation as in kernel_attend.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

RECORD = gl.constexpr(16)
PREFETCH = gl.constexpr("""{
.reg .pred p;
.reg .b32 t;
mov.u32 t, %tid.x;
setp.lt.u32 p, t, $3;
@p cp.async.bulk.prefetch.L2.global [$1], $2;
mov.b32 $0, 0;
}""")


@gluon.jit
def prefetch_tiles(cache, table, records, team, num_seqs, max_blocks, num_blocks, table_stride, L: gl.constexpr,
                   P: gl.constexpr, PAGE: gl.constexpr, K: gl.constexpr, TILES: gl.constexpr):  # fmt: skip
    """Ask for a team's first tiles while the kernel before this one still runs.

    The plan or the table may not be written yet. Whatever is read here only decides what comes to L2, within bounds,
    and it goes past L1, which would keep it.
    """
    record = records + team * RECORD
    seq = gl.load(record, cache_modifier=".cg")
    begin = gl.load(record + 4, cache_modifier=".cg")
    end = gl.load(record + 5, cache_modifier=".cg")
    seq = gl.minimum(gl.maximum(seq, 0), num_seqs - 1)
    begin = gl.minimum(gl.maximum(begin, 0), max_blocks * (PAGE // K))
    bytes_a_row: gl.constexpr = (L + P) * cache.dtype.element_ty.primitive_bitwidth // 8
    for ahead in gl.static_range(TILES):
        key = (begin + ahead) * K
        at = gl.minimum(key // PAGE, max_blocks - 1)
        block = gl.load(
            table + seq.to(gl.int64) * table_stride + at, mask=max_blocks > 0, other=0, cache_modifier=".cg"
        )
        block = gl.minimum(gl.maximum(block, 0), num_blocks - 1)
        row = block.to(gl.int64) * PAGE + key % PAGE
        there = (begin + ahead < end).to(gl.int32)
        address = cache.to(gl.int64) + row * bytes_a_row
        gl.inline_asm_elementwise(
            PREFETCH, "=r,l,r,r", [address, K * bytes_a_row, there], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def load_first(latents, rope_keys, row, half, rope, ready, L: gl.constexpr, there):
    """Start copying the first half of a tile's columns and its rope part; `ready` waits for the second half too."""
    mbarrier.expect(ready, 2 * latents.block_type.nbytes + rope_keys.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(latents, [row, 0], ready, half, pred=there)
    tma.async_copy_global_to_shared(rope_keys, [row, L], ready, rope, pred=there)


@gluon.jit
def load_second(latents, row, half, ready, H: gl.constexpr, there):
    """Start copying the second half."""
    tma.async_copy_global_to_shared(latents, [row, H], ready, half, pred=there)


@gluon.jit
def find_tile(table, begin, num_tiles, ahead, PAGE: gl.constexpr, K: gl.constexpr):
    """(the cache row that tile `ahead` of a segment starts at, whether the segment has that many)."""
    there = ahead < num_tiles
    key = (begin + ahead) * K
    return gl.load(table + key // PAGE, mask=there, other=0) * PAGE + key % PAGE, there


@gluon.jit
def load_tile(latents, rope_keys, table, begin, num_tiles, ahead, done, k1_shared, k2_shared, kr_shared, ready,
              L: gl.constexpr, PAGE: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Start copying tile `ahead` of a segment, if it has that many, to the buffers that it falls to."""
    row, there = find_tile(table, begin, num_tiles, ahead, PAGE, K)
    stage = (done + ahead) % STAGES
    load_first(latents, rope_keys, row, k1_shared.index(stage), kr_shared.index(stage), ready.index(stage), L, there)
    load_second(latents, row, k2_shared.index(stage), ready.index(stage), L // 2, there)


@gluon.jit
def load_queries(queries, rope_queries, row, q1, q2, qr, ready, L: gl.constexpr, there):
    """Start copying a tile of query rows."""
    mbarrier.expect(ready, 2 * queries.block_type.nbytes + rope_queries.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(queries, [row, 0], ready, q1, pred=there)
    tma.async_copy_global_to_shared(queries, [row, L // 2], ready, q2, pred=there)
    tma.async_copy_global_to_shared(rope_queries, [row, L], ready, qr, pred=there)


@gluon.jit
def last_keys(row_keys, first_row, num_rows, token, length, exists):
    """The last key that rows may see, if their segment exists; rows past its last one see what that one sees."""
    token = gl.minimum(token, num_rows - 1)
    if row_keys is None:
        return length - num_rows + token
    else:
        return gl.load(row_keys + first_row + token, mask=exists, other=0) - 1


@gluon.jit
def read_segment(records, row_keys, at, member, num_heads, exists, R: gl.constexpr, K: gl.constexpr):
    """(sequence, first query row, query rows, first packed row of this tile, first key tile, key tiles, slot, length)
    of a record, for one member of the team; of no use, but harmless, where no such record exists."""
    record = records + at * RECORD
    num_rows = gl.load(record + 2)
    tile_start = (gl.load(record + 3) + member) * R
    begin = gl.load(record + 4)
    length = gl.load(record + 7)
    # The last row of the tile sees most keys.
    last_key = last_keys(row_keys, gl.load(record + 1), num_rows, (tile_start + R - 1) // num_heads, length, exists)
    end = gl.minimum(gl.load(record + 5), gl.cdiv(last_key + 1, K))
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
