"""Attention of packed query rows over paged latents on Hopper (sm_90), in Gluon: the fast path of `attend_kernel`.

Triton-language cannot say three things that this needs: which warps hold which part of a product (two warpgroups would
compute the same scores twice), when a product is waited for, and when a tile of latents may be overwritten. How keys
are loaded and multiplied with queries and weights is said for latents of 16 bits in kernel_hopper_tiles.py, for float8
in kernel_hopper_float8_tiles.py. Notation as in kernel_attend.py; H = L / 2; a step takes BOXES of the plan's tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.mla_decode import kernel_hopper_float8_tiles as float8
from kimi_kernels.mla_decode import kernel_hopper_tiles as tiles
from kimi_kernels.mla_decode.kernel_hopper_segments import last_keys, prefetch_tiles, read_segment

BOX = gl.constexpr(64)  # keys of the plan's tiles
RECORD = gl.constexpr(16)
NO_SCORE = gl.constexpr(-1e30)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit(do_not_specialize=["table_stride", "num_seqs", "max_blocks"])
def attend_hopper_kernel(
    q,  # [tokens * heads, L + P], bf16 or float16: for float8 latents, else None
    cache,  # [cache rows, L + P]
    queries,  # q: descriptor of [R, H] boxes, or None for float8 latents
    rope_queries,  # the same: descriptor of [R, P] boxes, or None
    latents,  # the cache: descriptor of [BOX, H] boxes; float8 as int16 in [BOX, BOX]
    rope_keys,  # the same: descriptor of [BOX, P] boxes; float8 as int16 in [BOX, P / 2]
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
    FLOAT8: gl.constexpr,
    LSE: gl.constexpr,
    BOXES: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    SWAP: gl.constexpr = FLOAT8 or R < 64
    MASK_ALL: gl.constexpr = FLOAT8 and R == 64  # a branch costs these more than the masks that it saves
    H: gl.constexpr = L // 2
    K: gl.constexpr = BOXES * BOX
    groups: gl.constexpr = WARPS // (4 * BOXES)  # warpgroups that share a step's keys, or its rows
    if SWAP:
        score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS // groups, groups], [16, R // groups, 16])
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
    dtype: gl.constexpr = gl.float16 if FLOAT8 else latents.dtype
    weight_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for(score_shape, dtype)
    if FLOAT8:
        shared = float8.allocate(L, P, R, BOXES, STAGES)
    else:
        shared = tiles.allocate(latents, rope_keys, R, STAGES)
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
        cache, block_table, records, team, num_seqs, max_blocks, num_blocks, table_stride, L, P, PAGE, BOX,
        STAGES * BOXES,
    )  # fmt: skip
    gdc_wait()
    gdc_launch_dependents()  # the plan is there: the merging kernel reads it before it waits

    num_segments = gl.load(records + team * RECORD + 8)
    first_item = gl.load(records + team * RECORD + 9)
    seq, first_row, num_rows, tile_start, begin, num_tiles, slot, length = read_segment(
        records, row_keys, team, member, num_heads, num_segments > 0, R, BOX
    )
    if num_segments == 0:
        num_tiles = 0
    table = block_table + seq.to(gl.int64) * table_stride
    done = 0  # steps of earlier segments: which buffer comes next, in which phase
    if not FLOAT8:
        tiles.load_queries(queries, rope_queries, first_row * num_heads + tile_start, shared, q_ready, num_segments > 0)
    for ahead in gl.static_range(STAGES):
        load_step(latents, rope_keys, table, begin, num_tiles, ahead, done, shared, ready, PAGE, BOXES, STAGES, FLOAT8)
        if not FLOAT8 and ahead == 0:
            # All blocks start at once and memory serves all they ask for at once: ask for the first tile first.
            mbarrier.wait(q_ready, 0, pred=num_segments > 0)
    for segment in range(num_segments):
        # Read the next segment's record now: its loads start before this segment's result is stored.
        more = segment + 1 < num_segments
        next_at = gl.where(more, num_teams + first_item + segment + 1, team)
        (next_seq, next_first_row, next_num_rows, next_tile_start, next_begin, next_num_tiles, next_slot,
         next_length) = read_segment(records, row_keys, next_at, member, num_heads, more, R, BOX)  # fmt: skip
        next_num_tiles = gl.where(more, next_num_tiles, 0)
        if FLOAT8:
            unit = float8.widen_queries(
                q, first_row * num_heads + tile_start, num_rows * num_heads - tile_start, shared, L, P, R, WARPS,
                score_row,
            )  # fmt: skip
            fence_async_shared()
            row_scale = unit * scale
        token = (tile_start + gl.arange(0, R, score_row)) // num_heads
        last_key = last_keys(row_keys, first_row, num_rows, token, length, True)
        # Keys before this one are seen by every row of the tile: they need no mask.
        seen_by_all = last_keys(row_keys, first_row, num_rows, tile_start // num_heads, length, True) + 1
        if FLOAT8:
            last_key = gl.minimum(last_key, (begin + num_tiles) * BOX - 1)
            seen_by_all = gl.minimum(seen_by_all, (begin + num_tiles) * BOX)
        row_max = gl.full([R], NO_SCORE, gl.float32, score_row)
        weight_sum = gl.zeros(score_shape, gl.float32, score_layout)  # of every key position in a step
        acc1 = gl.zeros(acc_shape, gl.float32, out_layout)
        acc2 = gl.zeros(acc_shape, gl.float32, out_layout)
        if not FLOAT8:
            mbarrier.wait(q_ready, segment & 1)
        num_steps = gl.cdiv(num_tiles, BOXES)
        for index in range(num_steps):
            stage = (done + index) % STAGES
            phase = (done + index) // STAGES & 1
            first_key = (begin + index * BOXES) * BOX
            if FLOAT8:
                mbarrier.wait(ready.index(stage), phase)
                scores = float8.multiply_keys(shared, stage, length - first_key, score_layout, WARPS)
                scores = scores * gl.expand_dims(row_scale, key_axis)
            else:
                next_row, there = tiles.find_tile(latents, table, begin, num_tiles, index + STAGES, PAGE)
                mbarrier.wait(ready.index(stage), phase)
                scores = tiles.multiply_keys(shared, stage, length - first_key, score_layout, SWAP, WARPS)
            if MASK_ALL or first_key + K > seen_by_all:
                visible = gl.expand_dims(first_key + gl.arange(0, K, score_key), row_axis) <= gl.expand_dims(
                    last_key, key_axis
                )
                scores = gl.where(visible, scores, float("-inf"))
            if FLOAT8:
                new_max = gl.maximum(row_max, gl.max(scores, key_axis))
                weights = gl.exp2(scores - gl.expand_dims(new_max, key_axis))
            else:
                new_max = gl.maximum(row_max, gl.max(scores, key_axis) * scale)
                weights = gl.exp2(scores * scale - gl.expand_dims(new_max, key_axis))
            shrink = gl.exp2(row_max - new_max)
            weight_sum = weight_sum * gl.expand_dims(shrink, key_axis) + weights
            row_max = new_max
            weights_shared.store(weights.to(dtype))
            fence_async_shared()
            out_shrink = gl.expand_dims(gl.convert_layout(shrink, out_row), key_axis)
            acc1 = acc1 * out_shrink
            acc2 = acc2 * out_shrink
            if FLOAT8:
                acc1, acc2 = float8.multiply_values(
                    shared, stage, weights_shared, acc1, acc2, latents, rope_keys, table, begin, num_tiles,
                    index + STAGES, ready, out_layout, PAGE, BOXES,
                )  # fmt: skip
            else:
                acc1, acc2 = tiles.multiply_values(
                    shared, stage, weights_shared, acc1, acc2, latents, rope_keys, next_row, there, ready, SWAP
                )
        gl.thread_barrier()
        done += num_steps
        table = block_table + next_seq.to(gl.int64) * table_stride
        if not FLOAT8:
            tiles.load_queries(
                queries, rope_queries, next_first_row * num_heads + next_tile_start, shared, q_ready, more
            )
        for ahead in gl.static_range(STAGES):
            load_step(
                latents, rope_keys, table, next_begin, next_num_tiles, ahead, done, shared, ready, PAGE, BOXES, STAGES,
                FLOAT8,
            )  # fmt: skip

        tile_row = tile_start + gl.arange(0, R, score_row)
        exists = tile_row < num_rows * num_heads
        row_sum = gl.sum(weight_sum, key_axis)
        seen = row_sum > 0.0
        safe_sum = gl.where(seen, row_sum, 1.0)
        log_sum = gl.where(seen, row_max + gl.log2(safe_sum), float("-inf"))
        factor = gl.expand_dims(gl.convert_layout(gl.where(seen, kv_scale / safe_sum, 0.0), out_row), key_axis)
        out_tile_row = tile_start + gl.arange(0, R, out_row)
        out_exists = gl.expand_dims(out_tile_row < num_rows * num_heads, key_axis)
        if slot < 0:
            base = first_row.to(gl.int64) * num_heads
            store_result(acc1, acc2, factor, out, base + out_tile_row, out_exists, L, FLOAT8, key_axis, out_layout)
            if LSE:
                gl.store(lse + base + tile_row, log_sum * LN2, mask=exists)
        else:
            base = (slot.to(gl.int64) * team_size + member) * R - tile_start
            store_result(acc1, acc2, factor, part_out, base + out_tile_row, out_exists, L, FLOAT8, key_axis, out_layout)
            gl.store(part_lse + base + tile_row, log_sum, mask=exists)
        seq = next_seq
        first_row = next_first_row
        num_rows = next_num_rows
        tile_start = next_tile_start
        begin = next_begin
        num_tiles = next_num_tiles
        slot = next_slot
        length = next_length


@gluon.jit
def load_step(latents, rope_keys, table, begin, num_tiles, ahead, done, shared, ready, PAGE: gl.constexpr,
              BOXES: gl.constexpr, STAGES: gl.constexpr, FLOAT8: gl.constexpr):  # fmt: skip
    """Start copying step `ahead` of a segment, if it has that many, to the buffers that it falls to."""
    stage = (done + ahead) % STAGES
    if FLOAT8:
        float8.load_step(latents, rope_keys, table, begin, num_tiles, ahead, stage, shared, ready, PAGE, BOXES)
    else:
        tiles.load_step(latents, rope_keys, table, begin, num_tiles, ahead, stage, shared, ready, PAGE)


@gluon.jit
def store_result(acc1, acc2, factor, out, rows, exists, L: gl.constexpr, FLOAT8: gl.constexpr, key_axis: gl.constexpr,
                 layout: gl.constexpr):  # fmt: skip
    """Write both accumulators, each row times its factor."""
    rows = gl.expand_dims(rows, key_axis)
    column = gl.expand_dims(gl.arange(0, L // 2, gl.SliceLayout(1 - key_axis, layout)), 1 - key_axis)
    if FLOAT8:
        float8.store_columns(acc1 * factor, acc2 * factor, out, rows * (L // 2) + column, exists)
    else:
        place = out + rows * L + column
        gl.store(place, (acc1 * factor).to(out.dtype.element_ty), mask=exists)
        gl.store(place + L // 2, (acc2 * factor).to(out.dtype.element_ty), mask=exists)
