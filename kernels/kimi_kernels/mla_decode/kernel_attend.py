"""Attention of packed query rows over paged latents, one thread block a (team, tile); merge of cut results.

Notation in comments: R rows of a tile, K keys of a tile, L kv_lora_rank, P qk_rope_head_dim. Two orientations: with few
rows scores are [K, R] and the result [L, R], so that rows are the small dimension of the tensor cores' product and
nothing is padded to 64; with 64 rows they are [R, K] and [R, L]. Either way a tile of latents is loaded once and used
both as keys and as values.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

RECORD = tl.constexpr(16)
ENTRY = tl.constexpr(8)
NO_SCORE = tl.constexpr(-1e30)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _key_rows(table, tile, length, PAGE: tl.constexpr, K: tl.constexpr):
    """[K] int64: the cache row of every key of a tile; of keys past the sequence, some row that exists."""
    key = tile * K + tl.arange(0, K)
    return tl.load(table + key // PAGE, mask=key < length, other=0).to(tl.int64) * PAGE + key % PAGE


@triton.jit
def _last_keys(row_keys, first_row, num_rows, token, length):
    """The last key that rows may see; rows past the last one see what that one sees."""
    token = tl.minimum(token, num_rows - 1)
    if row_keys is None:
        return length - num_rows + token
    else:
        return tl.load(row_keys + first_row + token) - 1


@triton.jit
def _load_keys(cache, rows, in_sequence, L: tl.constexpr, P: tl.constexpr):
    """[K, L] and [K, P], with 0 past the end of the sequence, where 0 * NaN would spoil the values."""
    at = cache + rows[:, None] * (L + P)
    k_latent = tl.load(at + tl.arange(0, L)[None, :], mask=in_sequence[:, None], other=0.0)
    k_rope = tl.load(at + L + tl.arange(0, P)[None, :], mask=in_sequence[:, None], other=0.0)
    return k_latent, k_rope


@triton.jit
def _attend_tile(
    q_latent, q_rope, k_latent, k_rope, row_max, row_sum, acc, key, last_key, scale,
    SWAP: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax (Milakov & Gimelshein 2018) over the keys of a tile."""
    k_latent = k_latent.to(MATH)
    k_rope = k_rope.to(MATH)
    if SWAP:
        scores = tl.dot(k_latent, tl.trans(q_latent), input_precision="ieee")
        scores = tl.dot(k_rope, tl.trans(q_rope), scores, input_precision="ieee")
        visible = key[:, None] <= last_key[None, :]
        scores = tl.where(visible, scores, NO_SCORE)
        new_max = tl.maximum(row_max, tl.max(scores, 0) * scale)
        weights = tl.where(visible, tl.exp2(scores * scale - new_max[None, :]), 0.0)
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 0)
        acc = tl.dot(tl.trans(k_latent), weights.to(MATH), acc * shrink[None, :], input_precision="ieee")
    else:
        scores = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        visible = key[None, :] <= last_key[:, None]
        scores = tl.where(visible, scores, NO_SCORE)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.where(visible, tl.exp2(scores * scale - new_max[:, None]), 0.0)
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(MATH), k_latent, acc * shrink[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def _store_result(
    acc, row_sum, row_max, tile_row, exists, first_row, slot, member, out, lse, part_out, part_lse, num_heads,
    team_size, kv_scale, L: tl.constexpr, R: tl.constexpr, SWAP: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Write a finished tile where the caller wants it, or a cut one (float32, base-2 lse) for the merge."""
    seen = row_sum > 0.0
    safe_sum = tl.where(seen, row_sum, 1.0)
    factor = tl.where(seen, kv_scale / safe_sum, 0.0)
    column = tl.arange(0, L)
    if SWAP:
        result = tl.trans(acc * factor[None, :])
    else:
        result = acc * factor[:, None]
    log_sum = tl.where(seen, row_max + tl.log2(safe_sum), float("-inf"))
    if slot < 0:
        row = first_row.to(tl.int64) * num_heads + tile_row
        tl.store(out + row[:, None] * L + column[None, :], result.to(out.dtype.element_ty), mask=exists[:, None])
        if LSE:
            tl.store(lse + row, log_sum * LN2, mask=exists)
    else:
        row = (slot.to(tl.int64) * team_size + member) * R + tl.arange(0, R)
        tl.store(part_out + row[:, None] * L + column[None, :], result, mask=exists[:, None])
        tl.store(part_lse + row, log_sum, mask=exists)


@triton.jit(do_not_specialize=["table_stride", "num_teams"])
def attend_kernel(
    q,  # [tokens, heads, L + P], last dimension contiguous
    cache,  # [cache rows, L + P]
    block_table,  # [seqs, max blocks] int32
    row_keys,  # [tokens] int32: keys that each row sees, or None: a row sees one key less than the next
    records,
    out,  # [tokens, heads, L]
    lse,  # [tokens, heads] float32, natural log, or unused
    part_out,  # [slots, team_size, R, L] float32
    part_lse,  # [slots, team_size, R] float32, base 2
    q_token_stride,
    q_head_stride,
    table_stride,
    num_heads,
    num_teams,
    team_size,
    scale,  # softmax scale * kv_scale * log2(e)
    kv_scale,
    L: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SWAP: tl.constexpr,
    LSE: tl.constexpr,
    MATH: tl.constexpr,  # dtype of the products' operands
    STAGES: tl.constexpr,
):
    team = tl.program_id(0) // team_size
    member = tl.program_id(0) % team_size
    num_segments = tl.load(records + team * RECORD + 8)
    first_item = tl.load(records + team * RECORD + 9)
    for segment in range(num_segments):
        record = records + tl.where(segment == 0, team, num_teams + first_item + segment) * RECORD
        seq = tl.load(record + 0)
        first_row = tl.load(record + 1)
        num_rows = tl.load(record + 2)
        tile_row = (tl.load(record + 3) + member) * R + tl.arange(0, R)
        begin = tl.load(record + 4)
        end = tl.load(record + 5)
        slot = tl.load(record + 6)
        length = tl.load(record + 7)
        token = tile_row // num_heads
        exists = tile_row < num_rows * num_heads
        last_key = _last_keys(row_keys, first_row, num_rows, token, length)
        end = tl.minimum(end, tl.cdiv(tl.max(last_key) + 1, K))
        q_row = (first_row + token).to(tl.int64) * q_token_stride + tile_row % num_heads * q_head_stride
        q_at = q + q_row[:, None]
        q_latent = tl.load(q_at + tl.arange(0, L)[None, :], mask=exists[:, None], other=0.0).to(MATH)
        q_rope = tl.load(q_at + L + tl.arange(0, P)[None, :], mask=exists[:, None], other=0.0).to(MATH)
        row_max = tl.full([R], NO_SCORE, tl.float32)
        row_sum = tl.zeros([R], tl.float32)
        if SWAP:
            acc = tl.zeros([L, R], tl.float32)
        else:
            acc = tl.zeros([R, L], tl.float32)
        table = block_table + seq.to(tl.int64) * table_stride
        rows = _key_rows(table, begin, length, PAGE, K)
        for tile in tl.range(begin, end, num_stages=STAGES):
            key = tile * K + tl.arange(0, K)
            k_latent, k_rope = _load_keys(cache, rows, key < length, L, P)
            # Look the next tile up now: its load must not wait for the table.
            rows = _key_rows(table, tile + 1, length, PAGE, K)
            row_max, row_sum, acc = _attend_tile(
                q_latent, q_rope, k_latent, k_rope, row_max, row_sum, acc, key, last_key, scale, SWAP, MATH
            )
        _store_result(
            acc, row_sum, row_max, tile_row, exists, first_row, slot, member, out, lse, part_out, part_lse,
            num_heads, team_size, kv_scale, L, R, SWAP, LSE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def merge_kernel(
    part_out,  # [slots, team_size, R, L] float32
    part_lse,  # [slots, team_size, R] float32, base 2
    entries,
    cu_seqlens_q,  # [num_seqs + 1] int32
    out,  # [tokens, heads, L]
    lse,  # [tokens, heads] float32, or unused
    num_seqs,
    num_tokens,
    num_heads,
    team_size,
    L: tl.constexpr,
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,  # read at a time
    BALANCED: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,  # started before the kernel that it reads from has finished
):
    """One program an (item, ROWS, COLUMNS of the result): sum of the pieces, weighted by their share of the softmax."""
    item = tl.program_id(0)
    # The plan was there before the attending kernel let this one start. Past L1, which could hold an older one.
    entry = entries + (1 + item) * ENTRY
    is_item = item < tl.load(entries, cache_modifier=".cg")
    num_slots = tl.load(entry + 4, mask=is_item, other=0, cache_modifier=".cg")
    used_tokens = tl.load(cu_seqlens_q + num_seqs, cache_modifier=".cg")
    if PDL:
        gdc_launch_dependents()
        # Who has nothing to do leaves, but for one: the kernel after this one waits for this one only.
        if (num_slots <= 1) & (used_tokens >= num_tokens) & (item + tl.program_id(1) + tl.program_id(2) > 0):
            return
        gdc_wait()
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    # Padding rows, which no sequence owns, become 0, so that nothing downstream meets stale memory.
    for token in range(used_tokens + item, num_tokens, tl.num_programs(0)):
        for head in range(tl.program_id(1), num_heads, tl.num_programs(1)):
            at = tl.cast(token, tl.int64) * num_heads + head
            tl.store(out + at * L + column, tl.zeros([COLUMNS], out.dtype.element_ty))
            if LSE:
                tl.store(lse + at, float("-inf"))
    if num_slots <= 1:
        return
    first_tile = tl.load(entry + 2)
    num_rows = tl.minimum(tl.load(entry + 1) * num_heads - first_tile * R, team_size * R)
    tile_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = tile_row < num_rows
    first_slot = tl.load(entry + 3)
    total_max = tl.full([ROWS], NO_SCORE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, num_slots, SLOTS):
        piece = begin + tl.arange(0, SLOTS)
        if BALANCED:
            slot = first_slot + 2 * piece + (piece == 0).to(tl.int32)
        else:
            slot = first_slot + piece
        row = (slot.to(tl.int64) * (team_size * R))[:, None] + tile_row[None, :]
        there = (piece < num_slots)[:, None] & exists[None, :]
        log_sum = tl.load(part_lse + row, mask=there, other=float("-inf"))
        part = tl.load(part_out + row[:, :, None] * L + column[None, None, :], mask=there[:, :, None], other=0.0)
        new_max = tl.maximum(total_max, tl.max(log_sum, 0))
        shrink = tl.exp2(total_max - new_max)
        weight = tl.exp2(log_sum - new_max[None, :])
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        total_max = new_max
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    row = tl.load(entry).to(tl.int64) * num_heads + first_tile * R + tile_row
    result = tl.where(seen[:, None], acc / total[:, None], 0.0)
    tl.store(out + row[:, None] * L + column[None, :], result.to(out.dtype.element_ty), mask=exists[:, None])
    if LSE:
        if tl.program_id(2) == 0:
            tl.store(lse + row, tl.where(seen, (total_max + tl.log2(total)) * LN2, float("-inf")), mask=exists)
