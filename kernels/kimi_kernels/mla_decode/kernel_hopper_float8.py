"""`attend_hopper_kernel` for latents in float8: both products in float16, which holds float8 exactly.

Latents become float16 on their way from shared memory to the registers that the tensor cores take an operand from, so
that nothing is written back. They are read as words of two float8 columns; a word's two halves belong to two products:
of scores over columns (4 i, 4 i + 1) and (4 i + 2, 4 i + 3), of results for even and for odd columns. Rows are always
the products' second dimension. Notation as in kernel_attend.py; W = L / 2 words; a tile is BOXES of the plan's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.mla_decode.kernel_hopper_float8_tiles import (
    BOX,
    WIDEN_COLUMNS,
    WIDEN_KEYS,
    load_step,
    store_columns,
    widen,
    widen_queries,
)
from kimi_kernels.mla_decode.kernel_hopper_tiles import clear_unused, last_keys, prefetch_tiles, read_segment

RECORD = gl.constexpr(16)
NO_SCORE = gl.constexpr(-1e30)
LN2 = gl.constexpr(0.6931471805599453)
PV_KEYS = gl.constexpr(32)  # keys widened at a time for the second product


@gluon.jit(do_not_specialize=["table_stride", "num_seqs", "max_blocks"])
def attend_hopper_float8_kernel(
    q,  # [tokens * heads, L + P], bf16 or float16
    cache,  # [cache rows, L + P]
    latents,  # the cache as [cache rows, (L + P) / 2] int16: descriptor of [BOX, BOX] boxes
    rope_keys,  # the same: descriptor of [BOX, P / 2] boxes
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
    BOXES: gl.constexpr,
    LSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    W: gl.constexpr = L // 2
    K: gl.constexpr = BOXES * BOX
    WARPS: gl.constexpr = 8
    groups: gl.constexpr = 2 // BOXES  # warpgroups that share a tile's keys, each with a part of the rows
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8 // groups, groups], [16, R // groups, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, R, 16])
    score_operand: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    out_operand: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    score_row: gl.constexpr = gl.SliceLayout(0, score_layout)
    score_key: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_row: gl.constexpr = gl.SliceLayout(0, out_layout)
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    wide_half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    weight_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, R], gl.float16)

    q0 = gl.allocate_shared_memory(gl.float16, [R, W], wide)
    q1 = gl.allocate_shared_memory(gl.float16, [R, W], wide)
    rope0 = gl.allocate_shared_memory(gl.float16, [R, P // 2], wide_half)
    rope1 = gl.allocate_shared_memory(gl.float16, [R, P // 2], wide_half)
    boxes = gl.allocate_shared_memory(gl.int16, [STAGES * (W // BOX) * BOXES, BOX, BOX], wide)
    rope_boxes = gl.allocate_shared_memory(gl.int16, [STAGES * BOXES, BOX, P // 2], wide_half)
    tiles = boxes._reinterpret(gl.int16, [STAGES, K, W], wide)
    rope_tiles = rope_boxes._reinterpret(gl.int16, [STAGES, K, P // 2], wide_half)
    weights_shared = gl.allocate_shared_memory(gl.float16, [K, R], weight_shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(STAGES):
        mbarrier.init(ready.index(buffer), count=1)
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
    for ahead in gl.static_range(STAGES):
        load_step(latents, rope_keys, table, begin, num_tiles, ahead, ahead, boxes, rope_boxes, ready, W, PAGE, BOXES)
    for segment in range(num_segments):
        # Read the next segment's record now: its loads start before this segment's result is stored.
        more = segment + 1 < num_segments
        next_at = gl.where(more, num_teams + first_item + segment + 1, team)
        (next_seq, next_first_row, next_num_rows, next_tile_start, next_begin, next_num_tiles, next_slot,
         next_length) = read_segment(records, row_keys, next_at, member, num_heads, more, R, BOX)  # fmt: skip
        next_num_tiles = gl.where(more, next_num_tiles, 0)
        unit = widen_queries(
            q, first_row * num_heads + tile_start, num_rows * num_heads - tile_start, q0, q1, rope0, rope1, L, P, R,
            WARPS, score_row,
        )  # fmt: skip
        fence_async_shared()
        row_scale = unit * scale
        token = (tile_start + gl.arange(0, R, score_row)) // num_heads
        last_key = last_keys(row_keys, first_row, num_rows, token, length, True)
        last_key = gl.minimum(last_key, (begin + num_tiles) * BOX - 1)
        key_in_tile = gl.arange(0, K, score_key)
        row_max = gl.full([R], NO_SCORE, gl.float32, score_row)
        weight_sum = gl.zeros([K, R], gl.float32, score_layout)  # of every key position in a tile
        even = gl.zeros([W, R], gl.float32, out_layout)
        odd = gl.zeros([W, R], gl.float32, out_layout)
        num_steps = gl.cdiv(num_tiles, BOXES)
        for index in range(num_steps):
            stage = (done + index) % STAGES
            phase = (done + index) // STAGES & 1
            first_key = (begin + index * BOXES) * BOX
            tile = tiles.index(stage)
            rope_tile = rope_tiles.index(stage)
            mbarrier.wait(ready.index(stage), phase)
            if first_key + K > length:
                clear_unused(tile, length - first_key, WARPS)
            scores = gl.zeros([K, R], gl.float32, score_layout)
            low, high = widen(rope_tile.load(score_operand), WIDEN_COLUMNS)
            scores = warpgroup_mma(low, rope0.permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma(high, rope1.permute((1, 0)), scores, is_async=True)
            for chunk in gl.static_range(W // 64):
                old_low = low
                old_high = high
                low, high = widen(tile.slice(chunk * 64, 64, dim=1).load(score_operand), WIDEN_COLUMNS)
                scores, old_low, old_high = warpgroup_mma_wait(0, deps=[scores, old_low, old_high])
                scores = warpgroup_mma(low, q0.slice(chunk * 64, 64, dim=1).permute((1, 0)), scores, is_async=True)
                scores = warpgroup_mma(high, q1.slice(chunk * 64, 64, dim=1).permute((1, 0)), scores, is_async=True)
            scores, low, high = warpgroup_mma_wait(0, deps=[scores, low, high])
            scores = scores * row_scale[None, :]
            visible = (first_key + key_in_tile)[:, None] <= last_key[None, :]
            scores = gl.where(visible, scores, NO_SCORE)
            new_max = gl.maximum(row_max, gl.max(scores, 0))
            weights = gl.exp2(scores - new_max[None, :])
            weights = gl.where(visible, weights, 0.0)
            shrink = gl.exp2(row_max - new_max)
            weight_sum = weight_sum * shrink[None, :] + weights
            row_max = new_max
            weights_shared.store(weights.to(gl.float16))
            fence_async_shared()
            out_shrink = gl.convert_layout(shrink, out_row)[None, :]
            even = even * out_shrink
            odd = odd * out_shrink
            low, high = widen(tile.slice(0, PV_KEYS, dim=0).permute((1, 0)).load(out_operand), WIDEN_KEYS)
            even = warpgroup_mma(low, weights_shared.slice(0, PV_KEYS, dim=0), even, is_async=True)
            odd = warpgroup_mma(high, weights_shared.slice(0, PV_KEYS, dim=0), odd, is_async=True)
            for chunk in gl.static_range(1, K // PV_KEYS):
                old_low = low
                old_high = high
                low, high = widen(
                    tile.slice(chunk * PV_KEYS, PV_KEYS, dim=0).permute((1, 0)).load(out_operand), WIDEN_KEYS
                )
                even, odd, old_low, old_high = warpgroup_mma_wait(0, deps=[even, odd, old_low, old_high])
                even = warpgroup_mma(low, weights_shared.slice(chunk * PV_KEYS, PV_KEYS, dim=0), even, is_async=True)
                odd = warpgroup_mma(high, weights_shared.slice(chunk * PV_KEYS, PV_KEYS, dim=0), odd, is_async=True)
            gl.thread_barrier()  # every warp has read this tile
            load_step(
                latents, rope_keys, table, begin, num_tiles, index + STAGES, stage, boxes, rope_boxes, ready, W, PAGE,
                BOXES,
            )  # fmt: skip
            even, odd, low, high = warpgroup_mma_wait(0, deps=[even, odd, low, high])
        gl.thread_barrier()
        done += num_steps
        table = block_table + next_seq.to(gl.int64) * table_stride
        for ahead in gl.static_range(STAGES):
            load_step(
                latents, rope_keys, table, next_begin, next_num_tiles, ahead, (done + ahead) % STAGES, boxes,
                rope_boxes, ready, W, PAGE, BOXES,
            )  # fmt: skip

        tile_row = tile_start + gl.arange(0, R, score_row)
        exists = tile_row < num_rows * num_heads
        row_sum = gl.sum(weight_sum, 0)
        seen = row_sum > 0.0
        safe_sum = gl.where(seen, row_sum, 1.0)
        log_sum = gl.where(seen, row_max + gl.log2(safe_sum), float("-inf"))
        factor = gl.convert_layout(gl.where(seen, kv_scale / safe_sum, 0.0), out_row)
        out_tile_row = tile_start + gl.arange(0, R, out_row)
        out_exists = out_tile_row < num_rows * num_heads
        if slot < 0:
            base = first_row.to(gl.int64) * num_heads
            store_columns(even, odd, factor, out, base, out_tile_row, out_exists, L, out_layout)
            if LSE:
                gl.store(lse + base + tile_row, log_sum * LN2, mask=exists)
        else:
            base = (slot.to(gl.int64) * team_size + member) * R - tile_start
            store_columns(even, odd, factor, part_out, base, out_tile_row, out_exists, L, out_layout)
            gl.store(part_lse + base + tile_row, log_sum, mask=exists)
        seq = next_seq
        first_row = next_first_row
        num_rows = next_num_rows
        tile_start = next_tile_start
        begin = next_begin
        num_tiles = next_num_tiles
        slot = next_slot
        length = next_length
