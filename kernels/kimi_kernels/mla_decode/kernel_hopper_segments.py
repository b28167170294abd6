"""Pieces of `attend_hopper_kernel` for latents of any type: what the plan says, and rows past a sequence's end."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
