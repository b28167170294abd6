"""`attend_kernel` on Hopper (sm_90), in Gluon: two warpgroups, each with half of a tile's rows, share no barrier.

While one warpgroup does its softmax, the other's products run. Within a warpgroup the scores of a tile and the results
of the one before it are multiplied together, so that neither waits for the softmax between them. A third group of warps
only loads keys and values. Tiles of keys run from the last to the first, since those that some rows do not see whole
come last. Notation as in kernel_attend.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NO_SCORE = gl.constexpr(-1e30)
WARPS = gl.constexpr(4)
"""The warps of each warpgroup that multiplies."""


@gluon.jit
def _weights(scores, row_max, row_sum, key, last_key, scale, MASKED: gl.constexpr):
    """The softmax of K more keys: weights, the rows' new maximum and sum, and what results so far shrink by."""
    if MASKED:
        visible = gl.expand_dims(key, 0) <= gl.expand_dims(last_key, 1)
        scores = gl.where(visible, scores, NO_SCORE)
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - gl.expand_dims(new_max, 1))
    if MASKED:
        weights = gl.where(visible, weights, 0.0)
    shrink = gl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + gl.sum(weights, 1)
    return weights, new_max, row_sum, shrink


@gluon.jit
def _scores(q_nope, q_rope, keys, rope_keys, stage, layout: gl.constexpr, R: gl.constexpr, K: gl.constexpr):
    """Start the products of queries with a tile of keys."""
    scores = gl.zeros([R, K], gl.float32, layout)
    scores = warpgroup_mma(q_nope, keys.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    return warpgroup_mma(q_rope, rope_keys.index(stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _steps(
    begin, end, num_tiles, q_nope, q_rope, keys, rope_keys, values, keys_ready, values_ready, keys_free, values_free,
    weights, acc, row_max, row_sum, last_key, scale,
    MASKED: gl.constexpr, R: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """Multiply values with the weights of the tile before, while this tile's scores become weights."""
    key = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))
    for i in range(begin, end):
        stage = i % STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(keys_ready.index(stage), i // STAGES & 1)
        scores = _scores(q_nope, q_rope, keys, rope_keys, stage, LAYOUT, R, K)
        mbarrier.wait(values_ready.index(before), (i - 1) // STAGES & 1)
        acc = warpgroup_mma(weights, values.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(keys_free.index(stage), count=1)
        first_key = (num_tiles - 1 - i) * K
        more, row_max, row_sum, shrink = _weights(scores, row_max, row_sum, first_key + key, last_key, scale, MASKED)
        more = gl.convert_layout(more.to(weights.dtype), OPERAND)
        # The wait for buffers that have come already keeps the compiler from moving the softmax behind the products'.
        mbarrier.wait(values_ready.index(before), (i - 1) // STAGES & 1)
        acc, weights, more = warpgroup_mma_wait(0, deps=[acc, weights, more])
        mbarrier.arrive(values_free.index(before), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout)), 1)
        weights = more
    return weights, acc, row_max, row_sum


@gluon.jit
def _attend_rows(
    q, q_nope_rows, q_rope_rows, keys, rope_keys, values, keys_ready, values_ready, keys_free, values_free, state_out,
    state_lse, out, q_token_stride, q_head_stride, first_row, first_tile_row, num_rows, length, start, head, num_heads,
    num_tiles, num_masked, scale,
    WHICH: gl.constexpr, P: gl.constexpr, Q: gl.constexpr, V: gl.constexpr, R: gl.constexpr,
    K: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of the rows."""
    dtype: gl.constexpr = keys.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, V, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    score_row: gl.constexpr = gl.SliceLayout(1, layout)
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])

    q_nope = q_nope_rows.index(WHICH)
    q_rope = q_rope_rows.index(WHICH)
    tile_row = first_tile_row + WHICH * R + gl.arange(0, R, gl.SliceLayout(1, copy))
    row = (first_row + tile_row).to(gl.int64)
    q_at = gl.expand_dims(q + row * q_token_stride + head * q_head_stride, 1)
    exists = gl.expand_dims(tile_row < num_rows, 1)
    wide = gl.expand_dims(gl.arange(0, P, gl.SliceLayout(0, copy)), 0)
    narrow = gl.expand_dims(gl.arange(0, Q, gl.SliceLayout(0, copy)), 0)
    q_nope.store(gl.load(q_at + wide, mask=exists, other=0.0))
    q_rope.store(gl.load(q_at + P + narrow, mask=exists, other=0.0))
    fence_async_shared()
    gl.thread_barrier()

    tile_row = first_tile_row + WHICH * R + gl.arange(0, R, score_row)
    exists = tile_row < num_rows
    # Relative to the chunk; rows that do not exist see what the last one sees.
    last_key = length - num_rows + gl.minimum(tile_row, num_rows - 1) - start
    place = (first_row + tile_row).to(gl.int64) * num_heads + head
    out_row = first_tile_row + WHICH * R + gl.arange(0, R, gl.SliceLayout(1, out_layout))
    out_exists = gl.expand_dims(out_row < num_rows, 1)
    out_place = gl.expand_dims(((first_row + out_row).to(gl.int64) * num_heads + head) * V, 1)
    out_place = out_place + gl.expand_dims(gl.arange(0, V, gl.SliceLayout(0, out_layout)), 0)
    if FIRST:
        row_max = gl.full([R], NO_SCORE, gl.float32, score_row)
        row_sum = gl.zeros([R], gl.float32, score_row)
        acc = gl.zeros([R, V], gl.float32, out_layout)
    else:
        row_max = gl.load(state_lse + place, mask=exists, other=float("-inf"))
        row_sum = (row_max > NO_SCORE).to(gl.float32)
        row_max = gl.maximum(row_max, NO_SCORE)
        acc = gl.load(state_out + out_place, mask=out_exists, other=0.0)

    mbarrier.wait(keys_ready.index(0), 0)
    scores = _scores(q_nope, q_rope, keys, rope_keys, 0, layout, R, K)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(keys_free.index(0), count=1)
    key = (num_tiles - 1) * K + gl.arange(0, K, gl.SliceLayout(0, layout))
    more, row_max, row_sum, shrink = _weights(scores, row_max, row_sum, key, last_key, scale, True)
    if not FIRST:
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, out_layout)), 1)
    weights = gl.convert_layout(more.to(dtype), operand)
    weights, acc, row_max, row_sum = _steps(
        1, num_masked, num_tiles, q_nope, q_rope, keys, rope_keys, values, keys_ready, values_ready, keys_free,
        values_free, weights, acc, row_max, row_sum, last_key, scale, True, R, K, STAGES, layout, operand,
    )  # fmt: skip
    weights, acc, row_max, row_sum = _steps(
        num_masked, num_tiles, num_tiles, q_nope, q_rope, keys, rope_keys, values, keys_ready, values_ready, keys_free,
        values_free, weights, acc, row_max, row_sum, last_key, scale, False, R, K, STAGES, layout, operand,
    )  # fmt: skip
    last = (num_tiles - 1) % STAGES
    mbarrier.wait(values_ready.index(last), (num_tiles - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, values.index(last), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])

    seen = row_sum > 0.0
    safe_sum = gl.where(seen, row_sum, 1.0)
    factor = gl.convert_layout(gl.where(seen, 1.0 / safe_sum, 0.0), gl.SliceLayout(1, out_layout))
    result = acc * gl.expand_dims(factor, 1)
    if LAST:
        gl.store(out + out_place, result.to(out.dtype.element_ty), mask=out_exists)
    else:
        gl.store(state_out + out_place, result, mask=out_exists)
        log_sum = gl.where(seen, row_max + gl.log2(safe_sum), float("-inf"))
        gl.store(state_lse + place, log_sum, mask=exists)


@gluon.jit
def _load_tiles(
    k_nope, k_rope, v, keys, rope_keys, values, keys_ready, values_ready, keys_free, values_free, key_row, rope_row,
    num_tiles, P: gl.constexpr, Q: gl.constexpr, V: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load tiles of keys and values into buffers as they become free."""
    for i in range(num_tiles):
        stage = i % STAGES
        phase = (i // STAGES & 1) ^ 1
        offset = (num_tiles - 1 - i) * K
        mbarrier.wait(keys_free.index(stage), phase)
        mbarrier.expect(keys_ready.index(stage), K * (P + Q) * 2)
        tma.async_copy_global_to_shared(k_nope, [key_row + offset, 0], keys_ready.index(stage), keys.index(stage))
        tma.async_copy_global_to_shared(k_rope, [rope_row + offset, 0], keys_ready.index(stage), rope_keys.index(stage))
        mbarrier.wait(values_free.index(stage), phase)
        mbarrier.expect(values_ready.index(stage), K * V * 2)
        tma.async_copy_global_to_shared(v, [key_row + offset, 0], values_ready.index(stage), values.index(stage))


@gluon.jit(do_not_specialize=["num_seqs", "num_row_tiles"])
def attend_hopper_kernel(
    q,  # [tokens, heads, P + Q], last dimension contiguous
    k_nope,  # [heads * seqs * chunk, P]: descriptor of [K, P] boxes
    k_rope,  # [seqs * chunk, Q]: descriptor of [K, Q] boxes
    v,  # [heads * seqs * chunk, V]: descriptor of [K, V] boxes
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
    num_row_tiles,
    scale,  # softmax scale * log2(e)
    P: gl.constexpr,
    Q: gl.constexpr,
    V: gl.constexpr,
    R: gl.constexpr,  # of one warpgroup: a tile has 2 R rows
    K: gl.constexpr,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    head = gl.program_id(0)
    # Later rows see more keys: start with them, so that no long tile is left for the end.
    first_tile_row = (num_row_tiles - 1 - gl.program_id(1)) * (2 * R)
    seq = gl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first_row = gl.load(cu_seqlens_q + seq)
    num_rows = gl.load(cu_seqlens_q + seq + 1) - first_row
    if first_tile_row >= num_rows:
        return
    length = gl.load(seq_lens + seq)
    # The first and the last row that exist, relative to the chunk.
    lowest = length - num_rows + first_tile_row - start
    highest = length - num_rows + gl.minimum(first_tile_row + 2 * R, num_rows) - 1 - start
    # Rows that see no key of the chunk see none of its first tile.
    num_tiles = gl.maximum(gl.cdiv(gl.minimum(highest + 1, chunk), K), 1)
    whole = gl.minimum(gl.maximum(lowest + 1, 0) // K, num_tiles)
    num_masked = gl.minimum(gl.maximum(num_tiles - whole, 1), num_tiles)

    q_nope_rows = gl.allocate_shared_memory(k_nope.dtype, [2, R, P], k_nope.layout)
    q_rope_rows = gl.allocate_shared_memory(k_nope.dtype, [2, R, Q], k_rope.layout)
    keys = gl.allocate_shared_memory(k_nope.dtype, [STAGES, K, P], k_nope.layout)
    rope_keys = gl.allocate_shared_memory(k_nope.dtype, [STAGES, K, Q], k_rope.layout)
    values = gl.allocate_shared_memory(k_nope.dtype, [STAGES, K, V], v.layout)
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(buffer), count=1)
        mbarrier.init(values_ready.index(buffer), count=1)
        mbarrier.init(keys_free.index(buffer), count=2)
        mbarrier.init(values_free.index(buffer), count=2)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                _attend_rows,
                (
                    q, q_nope_rows, q_rope_rows, keys, rope_keys, values, keys_ready, values_ready, keys_free,
                    values_free, state_out, state_lse, out, q_token_stride, q_head_stride, first_row,
                    first_tile_row, num_rows, length, start, head, num_heads, num_tiles, num_masked, scale,
                    0, P, Q, V, R, K, FIRST, LAST, STAGES,
                ),
            ),
            (
                _attend_rows,
                (
                    q, q_nope_rows, q_rope_rows, keys, rope_keys, values, keys_ready, values_ready, keys_free,
                    values_free, state_out, state_lse, out, q_token_stride, q_head_stride, first_row,
                    first_tile_row, num_rows, length, start, head, num_heads, num_tiles, num_masked, scale,
                    1, P, Q, V, R, K, FIRST, LAST, STAGES,
                ),
            ),
            (
                _load_tiles,
                (
                    k_nope, k_rope, v, keys, rope_keys, values, keys_ready, values_ready, keys_free, values_free,
                    (head * num_seqs + seq) * chunk, seq * chunk, num_tiles, P, Q, V, K, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
