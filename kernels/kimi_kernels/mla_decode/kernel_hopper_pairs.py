"""`attend_hopper_kernel` for many rows over latents of 16 bits, whose products take longer than the bytes.

Tiles are taken in pairs. A group of warps loads them; each of two warpgroups computes the scores of one tile of a pair,
hands its weights to the other, and adds both tiles' values to its half of the result's columns: the tensor cores have
one warpgroup's products while the other one does its softmax (after FlashMLA, DeepSeek 2025). Weights lie where the
rope parts of their tile's keys lay. Half a tile's columns are loaded again once a warpgroup has read them as values.
Notation as there; M = 64 rows of a tile.
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

from kimi_kernels.mla_decode.kernel_hopper import LN2, NO_SCORE
from kimi_kernels.mla_decode.kernel_hopper_segments import (
    RECORD,
    clear_unused,
    last_keys,
    prefetch_tiles,
    read_segment,
)

HIDE = gl.constexpr("mov.b32 $0, $1;")
REGISTERS = gl.constexpr(240)
"""A multiplying thread holds half of the result and the scores of a tile."""


@gluon.jit(
    do_not_specialize=["table_stride", "num_seqs", "max_blocks", "num_blocks", "num_heads", "num_teams", "team_size"]
)
def attend_pairs_kernel(
    cache,  # arguments as of `attend_hopper_kernel`
    queries,
    rope_queries,
    latents,
    rope_keys,
    block_table,
    row_keys,
    records,
    out,
    lse,
    part_out,
    part_lse,
    table_stride,
    num_seqs,
    max_blocks,
    num_blocks,
    num_heads,
    num_teams,
    team_size,
    scale,
    kv_scale,
    L: gl.constexpr,
    P: gl.constexpr,
    PAGE: gl.constexpr,
    LSE: gl.constexpr,
):
    M: gl.constexpr = queries.block_type.shape[0]
    K: gl.constexpr = latents.block_type.shape[0]
    H: gl.constexpr = L // 2
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = (
        gl.allocate_shared_memory(latents.dtype, [M, H], latents.layout),
        gl.allocate_shared_memory(latents.dtype, [M, H], latents.layout),
        gl.allocate_shared_memory(latents.dtype, [M, P], rope_keys.layout),
        gl.allocate_shared_memory(latents.dtype, [2, K, H], latents.layout),
        gl.allocate_shared_memory(latents.dtype, [2, K, H], latents.layout),
        gl.allocate_shared_memory(latents.dtype, [2, K, P], rope_keys.layout),  # P = K: weights too, once read
    )
    maxima = gl.allocate_shared_memory(gl.float32, [2, M], plain)
    sums = gl.allocate_shared_memory(gl.float32, [4, M], plain)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())  # halves of the first tile, ...
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    weights_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sums_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for at in gl.static_range(4):
        mbarrier.init(full.index(at), count=1)
        mbarrier.init(empty.index(at), count=1)
    for at in gl.static_range(2):
        mbarrier.init(weights_ready.index(at), count=1)
        mbarrier.init(sums_ready.index(at), count=1)
    fence_async_shared()
    team = gl.program_id(0) // team_size
    prefetch_tiles(cache, block_table, records, team, num_seqs, max_blocks, num_blocks, table_stride, L, P, PAGE, K, 2)
    gdc_wait()
    gdc_launch_dependents()  # the plan is there: the merging kernel reads it before it waits
    plan = (row_keys, records, num_heads, num_teams, team_size)
    results = (out, lse, part_out, part_lse)
    flags = (q_full, q_empty, full, empty, weights_ready, sums_ready)
    gl.warp_specialize(
        [
            (_load, (queries, rope_queries, latents, rope_keys, block_table, table_stride, plan, shared, flags, PAGE)),
            (_multiply, (plan, results, scale, kv_scale, shared, maxima, sums, flags, LSE, 0)),
            (_multiply, (plan, results, scale, kv_scale, shared, maxima, sums, flags, LSE, 1)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


@gluon.jit
def _segment(plan, index, num_segments, first_item, M: gl.constexpr, K: gl.constexpr):
    """`read_segment` of this block's segment `index`; past the last one, of its first."""
    row_keys, records, num_heads, num_teams, team_size = plan
    team = gl.program_id(0) // team_size
    exists = index < num_segments
    at = gl.where(exists & (index > 0), num_teams + first_item + index, team)
    return read_segment(records, row_keys, at, gl.program_id(0) % team_size, num_heads, exists, M, K)


@gluon.jit
def _load(queries, rope_queries, latents, rope_keys, block_table, table_stride, plan, shared, flags,
          PAGE: gl.constexpr):  # fmt: skip
    """Copy queries of each segment, then its tiles; an odd last tile twice."""
    q1, q2, qr, left, right, rope = shared
    q_full, q_empty, full, empty, _, _ = flags
    _, records, num_heads, _, team_size = plan
    M: gl.constexpr = queries.block_type.shape[0]
    K: gl.constexpr = latents.block_type.shape[0]
    H: gl.constexpr = latents.block_type.shape[1]
    team = gl.program_id(0) // team_size
    num_segments = gl.load(records + team * RECORD + 8)
    first_item = gl.load(records + team * RECORD + 9)
    pairs_done = 0
    q_done = 0
    for segment in range(num_segments):
        seq, first_row, _, tile_start, begin, num_tiles, _, _ = _segment(plan, segment, num_segments, first_item, M, K)
        table = block_table + seq.to(gl.int64) * table_stride
        pairs = gl.cdiv(num_tiles, 2)
        if pairs > 0:
            mbarrier.wait(q_empty, (q_done & 1) ^ 1)
            row = first_row * num_heads + tile_start
            mbarrier.expect(q_full, 2 * queries.block_type.nbytes + rope_queries.block_type.nbytes)
            tma.async_copy_global_to_shared(queries, [row, 0], q_full, q1)
            tma.async_copy_global_to_shared(queries, [row, H], q_full, q2)
            tma.async_copy_global_to_shared(rope_queries, [row, 2 * H], q_full, qr)
            q_done += 1
        for index in range(pairs):
            phase = ((pairs_done + index) & 1) ^ 1
            for buffer in gl.static_range(2):
                key = (begin + gl.minimum(2 * index + buffer, num_tiles - 1)) * K
                row = gl.load(table + key // PAGE) * PAGE + key % PAGE
                for half in gl.static_range(2):
                    mbarrier.wait(empty.index(2 * buffer + half), phase)
                    filled = full.index(2 * buffer + half)
                    # The half that the other warpgroup gives back brings the rope part: it has read the weights there.
                    if buffer == half:
                        mbarrier.expect(filled, latents.block_type.nbytes)
                    else:
                        mbarrier.expect(filled, latents.block_type.nbytes + rope_keys.block_type.nbytes)
                        tma.async_copy_global_to_shared(rope_keys, [row, 2 * H], filled, rope.index(buffer))
                    columns = right if half else left
                    tma.async_copy_global_to_shared(latents, [row, half * H], filled, columns.index(buffer))
        pairs_done += pairs


@gluon.jit
def _hidden(value):
    """The value, out of sight of the compiler, which would keep addresses that follow from it in registers."""
    return gl.inline_asm_elementwise(HIDE, "=r,r", [gl.to_tensor(value)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _scores(shared, full, phase, own, OWN: gl.constexpr, layout: gl.constexpr):
    q1, q2, qr, left, right, rope = shared
    M: gl.constexpr = q1.shape[0]
    K: gl.constexpr = left.shape[1]
    scores = gl.zeros([M, K], gl.float32, layout)
    mbarrier.wait(full.index(2 * OWN), phase)
    scores = warpgroup_mma(q1, left.index(own).permute((1, 0)), scores, use_acc=False, is_async=True)
    mbarrier.wait(full.index(2 * OWN + 1), phase)
    scores = warpgroup_mma(q2, right.index(own).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(qr, rope.index(own).permute((1, 0)), scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _multiply(plan, results, scale, kv_scale, shared, maxima, sums, flags, LSE: gl.constexpr, OWN: gl.constexpr):
    """Warpgroup OWN: scores of the pairs' tiles OWN, values of both in half OWN of the columns."""
    q1, _, _, left, right, rope = shared
    q_full, q_empty, full, empty, weights_ready, sums_ready = flags
    row_keys, records, num_heads, _, team_size = plan
    OTHER: gl.constexpr = 1 - OWN
    M: gl.constexpr = q1.shape[0]
    K: gl.constexpr = left.shape[1]
    H: gl.constexpr = left.shape[2]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    score_row: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_row: gl.constexpr = gl.SliceLayout(1, out_layout)
    half = right if OWN else left
    team = gl.program_id(0) // team_size
    num_segments = gl.load(records + team * RECORD + 8)
    first_item = gl.load(records + team * RECORD + 9)
    pairs_done = 0
    q_done = 0
    _, first_row, num_rows, tile_start, begin, num_tiles, slot, length = _segment(
        plan, 0, num_segments, first_item, M, K
    )
    for segment in range(num_segments):
        (_, next_first_row, next_num_rows, next_tile_start, next_begin, next_num_tiles, next_slot,
         next_length) = _segment(plan, segment + 1, num_segments, first_item, M, K)  # fmt: skip
        token = (tile_start + gl.arange(0, M, score_row)) // num_heads
        last_key = last_keys(row_keys, first_row, num_rows, token, length, True)
        last_key = gl.minimum(last_key, (begin + num_tiles) * K - 1)
        key_in_tile = gl.arange(0, K, gl.SliceLayout(0, score_layout))
        row_max = gl.full([M], NO_SCORE, gl.float32, score_row)
        row_sum = gl.zeros([M], gl.float32, score_row)
        acc = gl.zeros([M, H], gl.float32, out_layout)
        pairs = gl.cdiv(num_tiles, 2)
        if pairs > 0:
            mbarrier.wait(q_full, q_done & 1)
            q_done += 1
        for index in range(pairs):
            phase = (pairs_done + index) & 1
            tile = begin + 2 * index + OWN
            own = _hidden(OWN)
            other = _hidden(OTHER)
            scores = _scores(shared, full, phase, own, OWN, score_layout)
            mbarrier.arrive(q_empty, pred=index + 1 == pairs)
            if (tile + 1) * K > length:
                clear_unused(left.index(own), length - tile * K, 4)
                clear_unused(right.index(own), length - tile * K, 4)
                fence_async_shared()
            visible = (tile * K + key_in_tile)[None, :] <= last_key[:, None]
            scores = gl.where(visible, scores, float("-inf"))
            tile_max = gl.max(scores, 1) * scale
            if OWN == 1:
                mbarrier.wait(weights_ready.index(OTHER), phase)
                other_max = maxima.index(OTHER).load(score_row)
                shrink = gl.exp2(row_max - other_max)
                row_sum = row_sum * shrink
                acc = acc * gl.convert_layout(shrink, out_row)[:, None]
                acc = warpgroup_mma(rope.index(other), half.index(other), acc, is_async=True)
                row_max = other_max
            new_max = gl.maximum(row_max, tile_max)
            weights = gl.exp2(scores * scale - new_max[:, None])
            shrink = gl.exp2(row_max - new_max)
            narrow = weights.to(left.dtype)
            rope.index(own).store(narrow)
            maxima.index(OWN).store(new_max)
            fence_async_shared()
            mbarrier.arrive(weights_ready.index(OWN))
            row_sum = row_sum * shrink + gl.sum(weights, 1)
            row_max = new_max
            if OWN == 1:
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index(2 * OTHER + OWN))
            acc = acc * gl.convert_layout(shrink, out_row)[:, None]
            acc = warpgroup_mma(gl.convert_layout(narrow, weight_layout), half.index(own), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(2 * OWN + OWN))
            if OWN == 0:
                mbarrier.wait(weights_ready.index(OTHER), phase)
                other_max = maxima.index(OTHER).load(score_row)
                shrink = gl.exp2(row_max - other_max)
                row_sum = row_sum * shrink
                row_max = other_max
                acc = acc * gl.convert_layout(shrink, out_row)[:, None]
                acc = warpgroup_mma(rope.index(other), half.index(other), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index(2 * OTHER + OWN))
        pairs_done += pairs

        sums.index(2 * (segment & 1) + OWN).store(row_sum)
        mbarrier.arrive(sums_ready.index(OWN))
        mbarrier.wait(sums_ready.index(OTHER), segment & 1)
        row_sum += sums.index(2 * (segment & 1) + OTHER).load(score_row)
        _store(acc, row_max, row_sum, results, kv_scale, first_row, num_rows, tile_start, slot, num_heads, team_size,
               LSE, OWN, out_layout, score_row)  # fmt: skip
        first_row = next_first_row
        num_rows = next_num_rows
        tile_start = next_tile_start
        begin = next_begin
        num_tiles = next_num_tiles
        slot = next_slot
        length = next_length


@gluon.jit
def _store(acc, row_max, row_sum, results, kv_scale, first_row, num_rows, tile_start, slot, num_heads, team_size,
           LSE: gl.constexpr, OWN: gl.constexpr, layout: gl.constexpr, score_row: gl.constexpr):  # fmt: skip
    """Write half OWN of the columns, and by the first warpgroup the log-sum-exp."""
    out, lse, part_out, part_lse = results
    M: gl.constexpr = acc.shape[0]
    H: gl.constexpr = acc.shape[1]
    out_row: gl.constexpr = gl.SliceLayout(1, layout)
    seen = row_sum > 0.0
    safe_sum = gl.where(seen, row_sum, 1.0)
    log_sum = gl.where(seen, row_max + gl.log2(safe_sum), float("-inf"))
    factor = gl.convert_layout(gl.where(seen, kv_scale / safe_sum, 0.0), out_row)
    result = acc * factor[:, None]
    tile_row = tile_start + gl.arange(0, M, score_row)
    exists = tile_row < num_rows * num_heads
    out_tile_row = tile_start + gl.arange(0, M, out_row)
    out_exists = (out_tile_row < num_rows * num_heads)[:, None]
    column = OWN * H + gl.arange(0, H, gl.SliceLayout(0, layout))
    if slot < 0:
        base = first_row.to(gl.int64) * num_heads
        place = (base + out_tile_row)[:, None] * (2 * H) + column[None, :]
        gl.store(out + place, result.to(out.dtype.element_ty), mask=out_exists)
        if LSE and OWN == 0:
            gl.store(lse + base + tile_row, log_sum * LN2, mask=exists)
    else:
        base = (slot.to(gl.int64) * team_size + gl.program_id(0) % team_size) * M - tile_start
        place = (base + out_tile_row)[:, None] * (2 * H) + column[None, :]
        gl.store(part_out + place, result, mask=out_exists)
        if OWN == 0:
            gl.store(part_lse + base + tile_row, log_sum, mask=exists)
