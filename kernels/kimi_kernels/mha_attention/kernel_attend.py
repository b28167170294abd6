"""Attention over paged keys and values, one program a (sequence and tile of rows, key head, share of the keys).

Rows of a sequence and key head are its query tokens times the query heads of that key head, packed: row r is token
r // group, head r % group. In comments: R rows of a tile, K keys of a tile, D head_dim.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NO_SCORE = tl.constexpr(-1e30)


@triton.jit
def _key_places(table, tile, length, key_stride, PAGE: tl.constexpr, K: tl.constexpr):
    """[K] int64: where each key of a tile lies, in elements; for keys past the sequence, somewhere that exists."""
    key = tile * K + tl.arange(0, K)
    block = tl.load(table + key // PAGE, mask=key < length, other=0).to(tl.int64)
    return (block * PAGE + key % PAGE) * key_stride


@triton.jit
def attend_kernel(
    q,  # [tokens, heads, D], last dimension contiguous
    keys,  # [blocks, PAGE, key heads, D], contiguous
    values,  # likewise
    block_table,  # [seqs, max blocks] int32
    cu_seqlens_q,  # [seqs + 1] int32
    seq_lens,  # [seqs] int32
    out,  # [tokens, heads, D]
    part_out,  # [splits, tokens, heads, D] float32
    part_lse,  # [splits, tokens, heads] float32, base 2
    q_token_stride,
    q_head_stride,
    table_stride,
    num_tokens,
    num_heads,
    num_kv_heads,
    num_tiles,
    window,  # keys a row sees at most
    scale,  # softmax scale * log2(e) * value_scale
    value_scale,  # what a float8 cache's keys and values are multiples of; else 1
    D: tl.constexpr,
    PAGE: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    MATH: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    group = num_heads // num_kv_heads
    seq = tl.program_id(0) // num_tiles
    # Later rows see more keys: start with them, so that no long tile is left for the end.
    first_tile_row = (num_tiles - 1 - tl.program_id(0) % num_tiles) * R
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first_row = tl.load(cu_seqlens_q + seq)
    num_rows = tl.load(cu_seqlens_q + seq + 1) - first_row
    length = tl.load(seq_lens + seq)
    if first_tile_row >= num_rows * group:
        return
    tile_row = first_tile_row + tl.arange(0, R)
    exists = tile_row < num_rows * group
    token = tl.minimum(tile_row // group, num_rows - 1)
    last_key = length - num_rows + token
    first_key = last_key - window + 1
    begin = tl.maximum(tl.min(first_key), 0) // K
    end = tl.cdiv(tl.max(last_key) + 1, K)
    share = tl.cdiv(tl.maximum(end - begin, 0), SPLITS)
    begin += split * share
    end = tl.minimum(end, begin + share)

    column = tl.arange(0, D)[None, :]
    head = kv_head * group + tile_row % group
    q_at = q + ((first_row + token).to(tl.int64) * q_token_stride + head * q_head_stride)[:, None] + column
    queries = tl.load(q_at, mask=exists[:, None], other=0.0).to(MATH)
    row_max = tl.full([R], NO_SCORE, tl.float32)
    row_sum = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, D], tl.float32)
    table = block_table + seq.to(tl.int64) * table_stride
    key_stride = num_kv_heads * D
    places = _key_places(table, begin, length, key_stride, PAGE, K)
    for tile in tl.range(begin, end, num_stages=STAGES):
        key = tile * K + tl.arange(0, K)
        # Slots past the sequence may hold NaN, and 0 * NaN would spoil the values.
        inside = (key < length)[:, None]
        at = places[:, None] + kv_head * D + column
        k = tl.load(keys + at, mask=inside, other=0.0).to(MATH)
        v = tl.load(values + at, mask=inside, other=0.0).to(MATH)
        places = _key_places(table, tile + 1, length, key_stride, PAGE, K)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        visible = (key[None, :] <= last_key[:, None]) & (key[None, :] >= first_key[:, None])
        scores = tl.where(visible, scores, NO_SCORE)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.where(visible, tl.exp2(scores * scale - new_max[:, None]), 0.0)
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(MATH), v, acc * shrink[:, None], input_precision="ieee")
        row_max = new_max
    seen = row_sum > 0.0
    safe_sum = tl.where(seen, row_sum, 1.0)
    result = acc * tl.where(seen, value_scale / safe_sum, 0.0)[:, None]
    row = (first_row + token).to(tl.int64) * num_heads + head
    if SPLITS == 1:
        tl.store(out + row[:, None] * D + column, result.to(out.dtype.element_ty), mask=exists[:, None])
    else:
        row += split.to(tl.int64) * num_tokens * num_heads
        tl.store(part_out + row[:, None] * D + column, result, mask=exists[:, None])
        log_sum = tl.where(seen, row_max + tl.log2(safe_sum), float("-inf"))
        tl.store(part_lse + row, log_sum, mask=exists)


@triton.jit
def merge_kernel(
    part_out,  # [splits, rows, D] float32
    part_lse,  # [splits, rows] float32, base 2
    cu_seqlens_q,
    out,  # [rows, D]; rows of no sequence become 0
    num_seqs,
    num_rows,
    num_heads,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a (token, head)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    owned = row < tl.load(cu_seqlens_q + num_seqs) * num_heads
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, D)
    at = split.to(tl.int64) * num_rows + row
    log_sum = tl.load(part_lse + at, mask=owned, other=float("-inf"))
    part = tl.load(part_out + at[:, None] * D + column[None, :], mask=owned, other=0.0)
    weight = tl.exp2(log_sum - tl.maximum(tl.max(log_sum, 0), NO_SCORE))
    total = tl.sum(weight, 0)
    result = tl.sum(part * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * D + column, result.to(out.dtype.element_ty))


@triton.jit
def store_kv_kernel(
    k,  # [tokens, key heads, D], last dimension contiguous
    v,  # likewise
    keys,  # [slots, key heads, D], contiguous
    values,  # likewise
    slot_mapping,  # [tokens] int64
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    num_kv_heads,
    width,
    inverse_scale,  # of a float8 cache
    limit,  # the largest value that it holds
    HEADS: tl.constexpr,
    D: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a (token, keys or values)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, D)[None, :]
    inside = (head < num_kv_heads) & (column < width)
    target = (slot * num_kv_heads + head) * width + column
    if tl.program_id(1) == 0:
        row = tl.load(k + token * k_token_stride + head * k_head_stride + column, mask=inside)
        if IS_FLOAT8:
            row = tl.minimum(tl.maximum(row.to(tl.float32) * inverse_scale, -limit), limit)
        tl.store(keys + target, row.to(keys.dtype.element_ty), mask=inside)
    else:
        row = tl.load(v + token * v_token_stride + head * v_head_stride + column, mask=inside)
        if IS_FLOAT8:
            row = tl.minimum(tl.maximum(row.to(tl.float32) * inverse_scale, -limit), limit)
        tl.store(values + target, row.to(values.dtype.element_ty), mask=inside)
