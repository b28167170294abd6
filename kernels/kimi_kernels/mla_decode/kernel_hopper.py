"""Attention of packed query rows over paged latents on Hopper (sm_90), in Gluon: the fast path of `attend_kernel`.

Triton-language cannot say three things that this needs: which warps hold which part of a product (two warpgroups would
compute the same scores twice), when a product is waited for, and when a tile of latents may be overwritten. Latents lie
in shared memory as two halves of their columns, so that half a tile is being loaded again while the other half is still
multiplied. Notation as in kernel_attend.py; H = L / 2.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.mla_decode.geometry import TILE_KEYS, DecodeGeometry

RECORD = gl.constexpr(16)
NO_SCORE = gl.constexpr(-1e30)
LN2 = gl.constexpr(0.6931471805599453)
NUM_WARPS = {16: 4, 32: 4, 64: 8}
"""Warps by rows of a tile, for 16-bit latents."""
NUM_WARPS_FLOAT8 = 8
"""Twice as many where they also widen the latents."""


@gluon.jit
def _load_first(latents, rope_keys, row, half, rope, ready, L: gl.constexpr, there):
    """Start copying the first half of a tile's columns and its rope part."""
    mbarrier.expect(ready, latents.block_type.nbytes + rope_keys.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(latents, [row, 0], ready, half, pred=there)
    tma.async_copy_global_to_shared(rope_keys, [row, L], ready, rope, pred=there)


@gluon.jit
def _load_second(latents, row, half, ready, H: gl.constexpr, there):
    """Start copying the second half."""
    mbarrier.expect(ready, latents.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(latents, [row, H], ready, half, pred=there)


@gluon.jit
def _clear_unused(half, num_used, WARPS: gl.constexpr):
    """Zero the rows of a tile past the end of its sequence: 0 * NaN would spoil the values."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    used = gl.arange(0, half.shape[0], gl.SliceLayout(1, layout)) < num_used
    for chunk in gl.static_range(half.shape[1] // 64):
        part = half.slice(chunk * 64, 64, dim=1)
        values = part.load(layout)
        part.store(gl.where(used[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _widen(raw, wide, WARPS: gl.constexpr):
    """Copy float8 rows to 16-bit ones: exact in float16."""
    step: gl.constexpr = 128 if raw.shape[1] >= 128 else raw.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [512 // step, step // 16], [WARPS, 1], [1, 0])
    for chunk in gl.static_range(raw.shape[1] // step):
        values = raw.slice(chunk * step, step, dim=1).load(layout)
        wide.slice(chunk * step, step, dim=1).store(values.to(wide.dtype))


@gluon.jit
def _copy_queries(q, row, num_used, wide, FIRST: gl.constexpr, ROW: gl.constexpr, WARPS: gl.constexpr):
    """Queries to shared memory, converted to the type of the products."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    index = gl.arange(0, wide.shape[0], gl.SliceLayout(1, layout))
    first = q + row.to(gl.int64) * ROW + FIRST
    place = index[:, None] * ROW + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    for chunk in gl.static_range(wide.shape[1] // 64):
        values = gl.load(first + chunk * 64 + place, mask=(index < num_used)[:, None], other=0.0)
        wide.slice(chunk * 64, 64, dim=1).store(values.to(wide.dtype))


@gluon.jit
def _multiply(queries, keys, scores, FRESH: gl.constexpr, SWAP: gl.constexpr):
    """scores += queries . keys over some columns, not waited for: [R, K], or [K, R] if SWAP."""
    if SWAP:
        return warpgroup_mma(keys, queries.permute((1, 0)), scores, use_acc=not FRESH, is_async=True)
    else:
        return warpgroup_mma(queries, keys.permute((1, 0)), scores, use_acc=not FRESH, is_async=True)


@gluon.jit
def _accumulate(weights, values, acc, SWAP: gl.constexpr):
    """acc += weights . values over some columns, not waited for: [R, H], or [H, R] if SWAP."""
    if SWAP:
        return warpgroup_mma(values.permute((1, 0)), weights, acc, is_async=True)
    else:
        return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def _store_half(acc, factor, out, base, tile_row, exists, FIRST: gl.constexpr, L: gl.constexpr,
                key_axis: gl.constexpr, row_axis: gl.constexpr, out_column: gl.constexpr):  # fmt: skip
    H: gl.constexpr = L // 2
    column = FIRST + gl.expand_dims(gl.arange(0, H, out_column), row_axis)
    place = gl.expand_dims(base + tile_row, key_axis) * L + column
    values = acc * gl.expand_dims(factor, key_axis)
    gl.store(out + place, values.to(out.dtype.element_ty), mask=gl.expand_dims(exists, key_axis))


@gluon.jit
def attend_hopper_kernel(
    q,  # [tokens * heads, L + P], read if latents are float8
    queries,  # the same: descriptor of [R, H] boxes
    rope_queries,  # the same: descriptor of [R, P] boxes
    latents,  # [cache rows, L + P]: descriptor of [K, H] boxes
    rope_keys,  # the same: descriptor of [K, P] boxes
    block_table,  # [seqs, max blocks] int32
    records,
    out,  # [tokens, heads, L]
    lse,  # [tokens, heads] float32, natural log, or unused
    part_out,  # [slots, team_size, R, L] float32
    part_lse,  # [slots, team_size, R] float32, base 2
    table_stride,
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
    NARROW: gl.constexpr = latents.dtype.primitive_bitwidth == 8
    dtype: gl.constexpr = gl.float16 if NARROW else latents.dtype
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
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    weight_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for(score_shape, dtype)

    q1_shared = gl.allocate_shared_memory(dtype, [R, H], wide)
    q2_shared = gl.allocate_shared_memory(dtype, [R, H], wide)
    qr_shared = gl.allocate_shared_memory(dtype, [R, P], wide)
    k1_shared = gl.allocate_shared_memory(latents.dtype, [STAGES, K, H], latents.layout)
    k2_shared = gl.allocate_shared_memory(latents.dtype, [STAGES, K, H], latents.layout)
    kr_shared = gl.allocate_shared_memory(latents.dtype, [STAGES, K, P], rope_keys.layout)
    if NARROW:
        k1_wide = gl.allocate_shared_memory(dtype, [K, H], wide)
        k2_wide = gl.allocate_shared_memory(dtype, [K, H], wide)
        kr_wide = gl.allocate_shared_memory(dtype, [K, P], wide)
    weights_shared = gl.allocate_shared_memory(dtype, score_shape, weight_shared)
    ready1 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready2 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(STAGES):
        mbarrier.init(ready1.index(buffer), count=1)
        mbarrier.init(ready2.index(buffer), count=1)
    mbarrier.init(q_ready, count=1)
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()

    team = gl.program_id(0) // team_size
    member = gl.program_id(0) % team_size
    num_segments = gl.load(records + team * RECORD + 8)
    first_item = gl.load(records + team * RECORD + 9)
    done = 0  # tiles of earlier segments: which buffer comes next, in which phase
    for segment in range(num_segments):
        at = team
        if segment > 0:
            at = num_teams + first_item + segment
        record = records + at * RECORD
        seq = gl.load(record + 0)
        first_row = gl.load(record + 1)
        num_rows = gl.load(record + 2)
        first_tile_row = (gl.load(record + 3) + member) * R
        begin = gl.load(record + 4)
        end = gl.load(record + 5)
        slot = gl.load(record + 6)
        length = gl.load(record + 7)
        # The last row of this tile sees most keys.
        last_token = gl.minimum((first_tile_row + R - 1) // num_heads, num_rows - 1)
        end = gl.minimum(end, gl.cdiv(length - num_rows + last_token + 1, K))
        num_tiles = gl.maximum(end - begin, 0)
        if first_tile_row >= num_rows * num_heads:
            num_tiles = 0
        table = block_table + seq.to(gl.int64) * table_stride

        gl.thread_barrier()  # nobody reads the buffers any more
        for ahead in gl.static_range(STAGES):
            free = (done + ahead) % STAGES
            there = ahead < num_tiles
            block = gl.load(table + (begin + ahead) * K // PAGE, mask=there, other=0)
            row = block * PAGE + (begin + ahead) * K % PAGE
            _load_first(latents, rope_keys, row, k1_shared.index(free), kr_shared.index(free), ready1.index(free), L,
                        there)  # fmt: skip
            _load_second(latents, row, k2_shared.index(free), ready2.index(free), H, there)
        q_row = first_row * num_heads + first_tile_row
        if NARROW:
            num_used = num_rows * num_heads - first_tile_row
            _copy_queries(q, q_row, num_used, q1_shared, 0, L + P, WARPS)
            _copy_queries(q, q_row, num_used, q2_shared, H, L + P, WARPS)
            _copy_queries(q, q_row, num_used, qr_shared, L, L + P, WARPS)
            fence_async_shared()
        else:
            mbarrier.expect(q_ready, R * (L + P) * 2)
            tma.async_copy_global_to_shared(queries, [q_row, 0], q_ready, q1_shared)
            tma.async_copy_global_to_shared(queries, [q_row, H], q_ready, q2_shared)
            tma.async_copy_global_to_shared(rope_queries, [q_row, L], q_ready, qr_shared)

        token = (first_tile_row + gl.arange(0, R, score_row)) // num_heads
        last_key = length - num_rows + gl.minimum(token, num_rows - 1)
        key_in_tile = gl.arange(0, K, score_key)
        row_max = gl.full([R], NO_SCORE, gl.float32, score_row)
        row_sum = gl.zeros([R], gl.float32, score_row)
        acc1 = gl.zeros(acc_shape, gl.float32, out_layout)
        acc2 = gl.zeros(acc_shape, gl.float32, out_layout)
        if not NARROW:
            mbarrier.wait(q_ready, segment & 1)
        for index in range(num_tiles):
            stage = (done + index) % STAGES
            phase = (done + index) // STAGES & 1
            tile = begin + index
            there = index + STAGES < num_tiles
            next_block = gl.load(table + (tile + STAGES) * K // PAGE, mask=there, other=0)
            next_row = next_block * PAGE + (tile + STAGES) * K % PAGE
            k1 = k1_shared.index(stage)
            k2 = k2_shared.index(stage)
            kr = kr_shared.index(stage)
            ready_first = ready1.index(stage)
            ready_second = ready2.index(stage)
            scores = gl.zeros(score_shape, gl.float32, score_layout)
            mbarrier.wait(ready_first, phase)
            if NARROW:
                _widen(k1, k1_wide, WARPS)
                _widen(kr, kr_wide, WARPS)
                fence_async_shared()
                gl.thread_barrier()
                _load_first(latents, rope_keys, next_row, k1, kr, ready_first, L, there)
                scores = _multiply(q1_shared, k1_wide, scores, True, SWAP)
                scores = _multiply(qr_shared, kr_wide, scores, False, SWAP)
                mbarrier.wait(ready_second, phase)
                _widen(k2, k2_wide, WARPS)
                fence_async_shared()
                gl.thread_barrier()
                _load_second(latents, next_row, k2, ready_second, H, there)
                scores = _multiply(q2_shared, k2_wide, scores, False, SWAP)
            else:
                scores = _multiply(q1_shared, k1, scores, True, SWAP)
                scores = _multiply(qr_shared, kr, scores, False, SWAP)
                mbarrier.wait(ready_second, phase)
                scores = _multiply(q2_shared, k2, scores, False, SWAP)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if (tile + 1) * K > length:
                if NARROW:
                    _clear_unused(k1_wide, length - tile * K, WARPS)
                    _clear_unused(k2_wide, length - tile * K, WARPS)
                else:
                    _clear_unused(k1, length - tile * K, WARPS)
                    _clear_unused(k2, length - tile * K, WARPS)
                fence_async_shared()
            visible = gl.expand_dims(tile * K + key_in_tile, row_axis) <= gl.expand_dims(last_key, key_axis)
            scores = gl.where(visible, scores, NO_SCORE)
            new_max = gl.maximum(row_max, gl.max(scores, key_axis) * scale)
            weights = gl.exp2(scores * scale - gl.expand_dims(new_max, key_axis))
            weights = gl.where(visible, weights, 0.0)
            shrink = gl.exp2(row_max - new_max)
            row_sum = row_sum * shrink + gl.sum(weights, key_axis)
            row_max = new_max
            weights_shared.store(weights.to(dtype))
            fence_async_shared()
            out_shrink = gl.expand_dims(gl.convert_layout(shrink, out_row), key_axis)
            acc1 = acc1 * out_shrink
            acc2 = acc2 * out_shrink
            if NARROW:
                acc1 = _accumulate(weights_shared, k1_wide, acc1, SWAP)
                acc2 = _accumulate(weights_shared, k2_wide, acc2, SWAP)
                acc1, acc2 = warpgroup_mma_wait(0, deps=[acc1, acc2])
                gl.thread_barrier()
            else:
                acc1 = _accumulate(weights_shared, k1, acc1, SWAP)
                acc2 = _accumulate(weights_shared, k2, acc2, SWAP)
                acc1 = warpgroup_mma_wait(1, deps=[acc1])
                gl.thread_barrier()  # every warp has read the first half
                _load_first(latents, rope_keys, next_row, k1, kr, ready_first, L, there)
                acc2 = warpgroup_mma_wait(0, deps=[acc2])
                gl.thread_barrier()
                _load_second(latents, next_row, k2, ready_second, H, there)
        done += num_tiles

        tile_row = first_tile_row + gl.arange(0, R, score_row)
        exists = tile_row < num_rows * num_heads
        seen = row_sum > 0.0
        safe_sum = gl.where(seen, row_sum, 1.0)
        log_sum = gl.where(seen, row_max + gl.log2(safe_sum), float("-inf"))
        factor = gl.convert_layout(gl.where(seen, kv_scale / safe_sum, 0.0), out_row)
        out_tile_row = first_tile_row + gl.arange(0, R, out_row)
        out_exists = out_tile_row < num_rows * num_heads
        if slot < 0:
            base = first_row.to(gl.int64) * num_heads
            _store_half(acc1, factor, out, base, out_tile_row, out_exists, 0, L, key_axis, row_axis, out_column)
            _store_half(acc2, factor, out, base, out_tile_row, out_exists, H, L, key_axis, row_axis, out_column)
            if LSE:
                gl.store(lse + base + tile_row, log_sum * LN2, mask=exists)
        else:
            base = (slot.to(gl.int64) * team_size + member) * R - first_tile_row
            _store_half(acc1, factor, part_out, base, out_tile_row, out_exists, 0, L, key_axis, row_axis, out_column)
            _store_half(acc2, factor, part_out, base, out_tile_row, out_exists, H, L, key_axis, row_axis, out_column)
            gl.store(part_lse + base + tile_row, log_sum, mask=exists)


@functools.lru_cache(maxsize=16)
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def fits_hopper(q: Tensor, latent_cache: Tensor, kv_lora_rank: int) -> bool:
    """Whether `launch_hopper` takes this: Hopper, latents 512 + 64 wide, blocks of whole tiles."""
    return (
        _is_hopper(q.device)
        and latent_cache.dtype in (q.dtype, torch.float8_e4m3fn)
        and (kv_lora_rank, q.shape[2] - kv_lora_rank) == (512, 64)
        and latent_cache.shape[1] % TILE_KEYS == 0
    )


def launch_hopper(
    q: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    records: Tensor,
    out: Tensor,
    lse: Tensor | None,
    part_out: Tensor,
    part_lse: Tensor,
    geometry: DecodeGeometry,
    kv_lora_rank: int,
    scale: float,
    kv_scale: float,
) -> None:
    """Launch `attend_hopper_kernel`; arguments as `attend_kernel` takes them."""
    block_size, latent_dim = latent_cache.shape[1:]
    rope_dim = latent_dim - kv_lora_rank
    half = kv_lora_rank // 2
    rows = geometry.tile_rows
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    queries = q.contiguous().view(-1, latent_dim)
    cache_rows = latent_cache.view(-1, latent_dim)
    narrow = latent_cache.dtype.itemsize == 1
    # A box of the copy engine's 128-byte swizzle: 64 rope columns fill only half of one in float8.
    latent_layout = gl.NVMMASharedLayout(128, 8, 2) if narrow else layout
    rope_layout = gl.NVMMASharedLayout(64, 8, 2) if narrow else layout
    num_warps = NUM_WARPS_FLOAT8 if narrow else NUM_WARPS[rows]
    attend_hopper_kernel[(geometry.num_teams * geometry.team_size,)](
        queries,
        TensorDescriptor.from_tensor(queries, [rows, half], layout),
        TensorDescriptor.from_tensor(queries, [rows, rope_dim], layout),
        TensorDescriptor.from_tensor(cache_rows, [TILE_KEYS, half], latent_layout),
        TensorDescriptor.from_tensor(cache_rows, [TILE_KEYS, rope_dim], rope_layout),
        block_table, records, out, lse, part_out, part_lse,
        block_table.stride(0), geometry.num_heads, geometry.num_teams, geometry.team_size,
        scale, kv_scale,
        L=kv_lora_rank, P=rope_dim, PAGE=block_size, R=rows, K=TILE_KEYS, SWAP=rows < 64,
        LSE=lse is not None, STAGES=2, WARPS=num_warps, num_warps=num_warps, launch_pdl=True,
    )  # fmt: skip
