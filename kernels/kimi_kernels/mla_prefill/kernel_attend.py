"""Causal attention of new tokens over up-projected keys and values of one chunk of every sequence.

One program a (tile of R query tokens of a sequence, head). In comments: R query rows and K keys of a tile, P
qk_nope_head_dim, Q qk_rope_head_dim, V v_head_dim. Chunks after the first go on from what the chunk before left.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NO_SCORE = tl.constexpr(-1e30)


@triton.jit
def _attend_tile(
    q_nope, q_rope, k_nope, k_rope, v, row_max, row_sum, acc, key, last_key, scale,
    MASKED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over K keys; MASKED: some rows do not see all of them."""
    scores = tl.dot(q_nope, tl.trans(k_nope.to(MATH)), input_precision="ieee")
    scores = tl.dot(q_rope, tl.trans(k_rope.to(MATH)), scores, input_precision="ieee")
    if MASKED:
        scores = tl.where(key[None, :] <= last_key[:, None], scores, NO_SCORE)
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_max[:, None])
    if MASKED:
        weights = tl.where(key[None, :] <= last_key[:, None], weights, 0.0)
    shrink = tl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(MATH), v.to(MATH), acc, input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit(do_not_specialize=["num_seqs", "num_tiles"], do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens"])
def attend_kernel(
    q,  # [tokens, heads, P + Q], last dimension contiguous
    k_nope,  # [heads * seqs * chunk, P]: descriptor of [K, P] boxes
    k_rope,  # [seqs * chunk, Q]: descriptor of [K, Q] boxes
    values,  # [heads * seqs * chunk, V]: descriptor of [K, V] boxes
    cu_seqlens_q,  # [seqs + 1] int32
    seq_lens,  # [seqs] int32
    state_out,  # [tokens, heads, V] float32: result over the chunks so far
    state_lse,  # [tokens, heads] float32: its log2 of the softmax denominator, -inf if it saw no key
    out,  # [tokens, heads, V]
    q_token_stride,
    q_head_stride,
    start,  # first key of the chunk
    chunk,
    num_seqs,
    num_heads,
    num_tiles,
    scale,  # softmax scale * log2(e)
    P: tl.constexpr,
    Q: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MATH: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    # Later rows see more keys: start with them, so that no long tile is left for the end.
    first_tile_row = (num_tiles - 1 - tl.program_id(1)) * R
    seq = tl.program_id(2)
    first_row = tl.load(cu_seqlens_q + seq)
    num_rows = tl.load(cu_seqlens_q + seq + 1) - first_row
    if first_tile_row >= num_rows:
        return
    length = tl.load(seq_lens + seq)
    tile_row = first_tile_row + tl.arange(0, R)
    exists = tile_row < num_rows
    row = (first_row + tile_row).to(tl.int64)
    # Relative to the chunk; rows that do not exist see what the last one sees.
    last_key = length - num_rows + tl.minimum(tile_row, num_rows - 1) - start
    num_keys = tl.minimum(length - start, chunk)
    end = tl.cdiv(tl.minimum(tl.max(last_key) + 1, num_keys), K)
    # Tiles before this one are seen whole by every row.
    whole = tl.minimum(tl.maximum(tl.min(last_key) + 1, 0) // K, end)

    q_at = q + row[:, None] * q_token_stride + head * q_head_stride
    q_nope = tl.load(q_at + tl.arange(0, P)[None, :], mask=exists[:, None], other=0.0).to(MATH)
    q_rope = tl.load(q_at + P + tl.arange(0, Q)[None, :], mask=exists[:, None], other=0.0).to(MATH)
    place = row * num_heads + head
    column = tl.arange(0, V)[None, :]
    if FIRST:
        row_max = tl.full([R], NO_SCORE, tl.float32)
        row_sum = tl.zeros([R], tl.float32)
        acc = tl.zeros([R, V], tl.float32)
    else:
        row_max = tl.load(state_lse + place, mask=exists, other=float("-inf"))
        row_sum = (row_max > NO_SCORE).to(tl.float32)
        row_max = tl.maximum(row_max, NO_SCORE)
        acc = tl.load(state_out + place[:, None] * V + column, mask=exists[:, None], other=0.0)
    rope_row = seq * chunk
    key_row = (head * num_seqs + seq) * chunk
    for tile in tl.range(0, whole, num_stages=STAGES):
        row_max, row_sum, acc = _attend_tile(
            q_nope, q_rope, k_nope.load([key_row + tile * K, 0]), k_rope.load([rope_row + tile * K, 0]),
            values.load([key_row + tile * K, 0]), row_max, row_sum, acc, tile * K + tl.arange(0, K), last_key, scale,
            False, MATH,
        )  # fmt: skip
    for tile in tl.range(whole, end, num_stages=STAGES):
        row_max, row_sum, acc = _attend_tile(
            q_nope, q_rope, k_nope.load([key_row + tile * K, 0]), k_rope.load([rope_row + tile * K, 0]),
            values.load([key_row + tile * K, 0]), row_max, row_sum, acc, tile * K + tl.arange(0, K), last_key, scale,
            True, MATH,
        )  # fmt: skip
    seen = row_sum > 0.0
    safe_sum = tl.where(seen, row_sum, 1.0)
    result = acc * tl.where(seen, 1.0 / safe_sum, 0.0)[:, None]
    if LAST:
        tl.store(out + place[:, None] * V + column, result.to(out.dtype.element_ty), mask=exists[:, None])
    else:
        tl.store(state_out + place[:, None] * V + column, result, mask=exists[:, None])
        log_sum = tl.where(seen, row_max + tl.log2(safe_sum), float("-inf"))
        tl.store(state_lse + place, log_sum, mask=exists)
