"""Attention of packed query rows over paged latents on Hopper (sm_90), in Gluon: the fast path of `attend_kernel`.

Triton-language cannot say three things that this needs: which warps hold which part of a product (two warpgroups would
compute the same scores twice), when a product is waited for, and when a tile of latents may be overwritten. Latents lie
in shared memory as two halves of their columns, so that half a tile is being loaded again while the other half is still
multiplied. Notation as in kernel_attend.py; H = L / 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.mla_decode.kernel_hopper_tiles import (
    accumulate,
    clear_unused,
    find_tile,
    last_keys,
    load_first,
    load_queries,
    load_second,
    load_tile,
    multiply,
    prefetch_tiles,
    read_segment,
    store_half,
)

RECORD = gl.constexpr(16)
NO_SCORE = gl.constexpr(-1e30)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit(do_not_specialize=["table_stride", "num_seqs", "max_blocks"])
def attend_hopper_kernel(
    cache,  # [cache rows, L + P]
    queries,  # [tokens * heads, L + P]: descriptor of [R, H] boxes
    rope_queries,  # the same: descriptor of [R, P] boxes
    latents,  # the cache: descriptor of [K, H] boxes
    rope_keys,  # the same: descriptor of [K, P] boxes
    block_table,  # [seqs, max blocks] int32
    row_keys,  # [tokens] int32, or None
    records,
    out,  # [tokens, heads, L]
    lse,  # [tokens, heads] float32, natural log, or unused
    part_out,  # [slots, team_size, R, L] float32
    part_lse,  # [slots, team_size, R] float32, base 2
    table_stride,
    num_seqs,
    max_blocks,
    num_blocks,
    num_heads,
    num_teams,
    team_size,
    scale,  # softmax scale * kv_scale * log2(e)
    kv_scale,
    L: gl.constexpr,
    P: gl.constexpr,
    PAGE: gl.constexpr,
    R: gl.constexpr,
    K: gl.constexpr,
    SWAP: gl.constexpr,
    LSE: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    dtype: gl.constexpr = latents.dtype
    H: gl.constexpr = L // 2
    groups: gl.constexpr = WARPS // 4
    if SWAP:
        score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, R // groups, 16])
        out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, R, 16])
        key_axis: gl.constexpr = 0
        row_axis: gl.constexpr = 1
        acc_shape: gl.constexpr = [H, R]
        score_shape: gl.constexpr = [K, R]
    else:
        score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, K // groups, 16])
        out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, H // groups, 16])
        key_axis: gl.constexpr = 1
        row_axis: gl.constexpr = 0
        acc_shape: gl.constexpr = [R, H]
        score_shape: gl.constexpr = [R, K]
    score_row: gl.constexpr = gl.SliceLayout(key_axis, score_layout)
    score_key: gl.constexpr = gl.SliceLayout(row_axis, score_layout)
    out_row: gl.constexpr = gl.SliceLayout(key_axis, out_layout)
    out_column: gl.constexpr = gl.SliceLayout(row_axis, out_layout)
    weight_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for(score_shape, dtype)

    q1_shared = gl.allocate_shared_memory(latents.dtype, [R, H], latents.layout)
    q2_shared = gl.allocate_shared_memory(latents.dtype, [R, H], latents.layout)
    qr_shared = gl.allocate_shared_memory(latents.dtype, [R, P], rope_keys.layout)
    k1_shared = gl.allocate_shared_memory(latents.dtype, [STAGES, K, H], latents.layout)
    k2_shared = gl.allocate_shared_memory(latents.dtype, [STAGES, K, H], latents.layout)
    kr_shared = gl.allocate_shared_memory(latents.dtype, [STAGES, K, P], rope_keys.layout)
    weights_shared = gl.allocate_shared_memory(dtype, score_shape, weight_shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(STAGES):
        mbarrier.init(ready.index(buffer), count=1)
    mbarrier.init(q_ready, count=1)
    fence_async_shared()
    team = gl.program_id(0) // team_size
    member = gl.program_id(0) % team_size
    prefetch_tiles(
        cache, block_table, records, team, num_seqs, max_blocks, num_blocks, table_stride, L, P, PAGE, K, STAGES
    )
    gdc_wait()
    gdc_launch_dependents()  # the plan is there: the merging kernel reads it before it waits

    num_segments = gl.load(records + team * RECORD + 8)
    first_item = gl.load(records + team * RECORD + 9)
    seq, first_row, num_rows, tile_start, begin, num_tiles, slot, length = read_segment(
        records, row_keys, team, member, num_heads, num_segments > 0, R, K
    )
    if num_segments == 0:
        num_tiles = 0
    table = block_table + seq.to(gl.int64) * table_stride
    done = 0  # tiles of earlier segments: which buffer comes next, in which phase
    load_queries(
        queries, rope_queries, first_row * num_heads + tile_start, q1_shared, q2_shared, qr_shared, q_ready, L,
        num_segments > 0,
    )  # fmt: skip
    for ahead in gl.static_range(STAGES):
        load_tile(
            latents, rope_keys, table, begin, num_tiles, ahead, done, k1_shared, k2_shared, kr_shared, ready, L, PAGE,
            K, STAGES,
        )  # fmt: skip
        if ahead == 0:
            # All blocks start at once and memory serves all they ask for at once: ask for the first tile first.
            mbarrier.wait(q_ready, 0, pred=num_segments > 0)
    for segment in range(num_segments):
        # Read the next segment's record now: its loads start before this segment's result is stored.
        more = segment + 1 < num_segments
        next_at = gl.where(more, num_teams + first_item + segment + 1, team)
        (next_seq, next_first_row, next_num_rows, next_tile_start, next_begin, next_num_tiles, next_slot,
         next_length) = read_segment(records, row_keys, next_at, member, num_heads, more, R, K)  # fmt: skip
        next_num_tiles = gl.where(more, next_num_tiles, 0)
        token = (tile_start + gl.arange(0, R, score_row)) // num_heads
        last_key = last_keys(row_keys, first_row, num_rows, token, length, True)
        key_in_tile = gl.arange(0, K, score_key)
        row_max = gl.full([R], NO_SCORE, gl.float32, score_row)
        weight_sum = gl.zeros(score_shape, gl.float32, score_layout)  # of every key position in a tile
        acc1 = gl.zeros(acc_shape, gl.float32, out_layout)
        acc2 = gl.zeros(acc_shape, gl.float32, out_layout)
        mbarrier.wait(q_ready, segment & 1)
        for index in range(num_tiles):
            stage = (done + index) % STAGES
            phase = (done + index) // STAGES & 1
            tile = begin + index
            next_row, there = find_tile(table, begin, num_tiles, index + STAGES, PAGE, K)
            k1 = k1_shared.index(stage)
            k2 = k2_shared.index(stage)
            kr = kr_shared.index(stage)
            arrived = ready.index(stage)
            scores = gl.zeros(score_shape, gl.float32, score_layout)
            mbarrier.wait(arrived, phase)
            scores = multiply(q1_shared, k1, scores, True, SWAP)
            scores = multiply(qr_shared, kr, scores, False, SWAP)
            scores = multiply(q2_shared, k2, scores, False, SWAP)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if (tile + 1) * K > length:
                clear_unused(k1, length - tile * K, WARPS)
                clear_unused(k2, length - tile * K, WARPS)
                fence_async_shared()
            visible = gl.expand_dims(tile * K + key_in_tile, row_axis) <= gl.expand_dims(last_key, key_axis)
            scores = gl.where(visible, scores, NO_SCORE)
            new_max = gl.maximum(row_max, gl.max(scores, key_axis) * scale)
            weights = gl.exp2(scores * scale - gl.expand_dims(new_max, key_axis))
            weights = gl.where(visible, weights, 0.0)
            shrink = gl.exp2(row_max - new_max)
            weight_sum = weight_sum * gl.expand_dims(shrink, key_axis) + weights
            row_max = new_max
            weights_shared.store(weights.to(dtype))
            fence_async_shared()
            out_shrink = gl.expand_dims(gl.convert_layout(shrink, out_row), key_axis)
            acc1 = acc1 * out_shrink
            acc2 = acc2 * out_shrink
            acc1 = accumulate(weights_shared, k1, acc1, SWAP)
            acc2 = accumulate(weights_shared, k2, acc2, SWAP)
            acc1 = warpgroup_mma_wait(1, deps=[acc1])
            gl.thread_barrier()  # every warp has read the first half
            load_first(latents, rope_keys, next_row, k1, kr, arrived, L, there)
            acc2 = warpgroup_mma_wait(0, deps=[acc2])
            gl.thread_barrier()
            load_second(latents, next_row, k2, arrived, H, there)
        gl.thread_barrier()
        done += num_tiles
        table = block_table + next_seq.to(gl.int64) * table_stride
        load_queries(
            queries, rope_queries, next_first_row * num_heads + next_tile_start, q1_shared, q2_shared, qr_shared,
            q_ready, L, more,
        )  # fmt: skip
        for ahead in gl.static_range(STAGES):
            load_tile(
                latents, rope_keys, table, next_begin, next_num_tiles, ahead, done, k1_shared, k2_shared, kr_shared,
                ready, L, PAGE, K, STAGES,
            )  # fmt: skip

        tile_row = tile_start + gl.arange(0, R, score_row)
        exists = tile_row < num_rows * num_heads
        row_sum = gl.sum(weight_sum, key_axis)
        seen = row_sum > 0.0
        safe_sum = gl.where(seen, row_sum, 1.0)
        log_sum = gl.where(seen, row_max + gl.log2(safe_sum), float("-inf"))
        factor = gl.convert_layout(gl.where(seen, kv_scale / safe_sum, 0.0), out_row)
        out_tile_row = tile_start + gl.arange(0, R, out_row)
        out_exists = out_tile_row < num_rows * num_heads
        if slot < 0:
            base = first_row.to(gl.int64) * num_heads
            store_half(acc1, factor, out, base, out_tile_row, out_exists, 0, L, key_axis, row_axis, out_column)
            store_half(acc2, factor, out, base, out_tile_row, out_exists, H, L, key_axis, row_axis, out_column)
            if LSE:
                gl.store(lse + base + tile_row, log_sum * LN2, mask=exists)
        else:
            base = (slot.to(gl.int64) * team_size + member) * R - tile_start
            store_half(acc1, factor, part_out, base, out_tile_row, out_exists, 0, L, key_axis, row_axis, out_column)
            store_half(acc2, factor, part_out, base, out_tile_row, out_exists, H, L, key_axis, row_axis, out_column)
            gl.store(part_lse + base + tile_row, log_sum, mask=exists)
        seq = next_seq
        first_row = next_first_row
        num_rows = next_num_rows
        tile_start = next_tile_start
        begin = next_begin
        num_tiles = next_num_tiles
        slot = next_slot
        length = next_length
