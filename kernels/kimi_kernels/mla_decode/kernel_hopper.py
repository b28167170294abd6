"""Attention of packed query rows over paged latents on Hopper (sm_90), in Gluon: the fast path of `attend_kernel`.

Triton-language cannot say two things that this needs: which warps hold which part of a product (two warpgroups would
compute the same scores twice), and when a tile of latents may be overwritten. Notation as in kernel_attend.py.
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

from kimi_kernels.mla_decode.geometry import TILE_KEYS, DecodeGeometry

RECORD = gl.constexpr(16)
NO_SCORE = gl.constexpr(-1e30)
LN2 = gl.constexpr(0.6931471805599453)
NUM_WARPS = {16: 4, 32: 4, 64: 8}
"""Warps by rows of a tile."""


@gluon.jit
def _issue_tile(latents, rope_keys, block, tile, buffer, rope_buffer, ready, PAGE: gl.constexpr, K: gl.constexpr,
                L: gl.constexpr, P: gl.constexpr, pred):  # fmt: skip
    """Start copying a tile of latents to shared memory; `ready` completes when all of it has arrived."""
    row = block * PAGE + tile * K % PAGE
    mbarrier.expect(ready, K * (L + P) * latents.dtype.primitive_bitwidth // 8, pred=pred)
    tma.async_copy_global_to_shared(rope_keys, [row, L], ready, rope_buffer, pred=pred)
    tma.async_copy_global_to_shared(latents, [row, 0], ready, buffer, pred=pred)


@gluon.jit
def _clear_unused(buffer, num_used, K: gl.constexpr, L: gl.constexpr, WARPS: gl.constexpr):
    """Zero the rows of a tile past the end of its sequence: 0 * NaN would spoil the values."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    used = gl.arange(0, K, gl.SliceLayout(1, layout)) < num_used
    for chunk in gl.static_range(L // 64):
        part = buffer.slice(chunk * 64, 64, dim=1)
        values = part.load(layout)
        part.store(gl.where(used[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _widen_tile(raw, wide, num_used, WIDTH: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr):
    """Copy float8 rows to 16-bit ones (exact in float16), with 0 past the end of the sequence."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [512 // STEP, STEP // 16], [WARPS, 1], [1, 0])
    used = gl.arange(0, raw.shape[0], gl.SliceLayout(1, layout)) < num_used
    for chunk in gl.static_range(WIDTH // STEP):
        values = raw.slice(chunk * STEP, STEP, dim=1).load(layout).to(wide.dtype)
        wide.slice(chunk * STEP, STEP, dim=1).store(gl.where(used[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _copy_queries(q, row, num_used, wide, FIRST: gl.constexpr, ROW: gl.constexpr, WIDTH: gl.constexpr,
                  R: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Queries to shared memory, converted to the type of the products."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    index = gl.arange(0, R, gl.SliceLayout(1, layout))
    place = (row + index).to(gl.int64)[:, None] * ROW + FIRST + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    for chunk in gl.static_range(WIDTH // 64):
        values = gl.load(q + place + chunk * 64, mask=(index < num_used)[:, None], other=0.0)
        wide.slice(chunk * 64, 64, dim=1).store(values.to(wide.dtype))


@gluon.jit
def attend_hopper_kernel(
    q,  # [tokens * heads, L + P], read if latents are float8
    queries,  # [tokens * heads, L + P]: descriptor of [R, L] boxes
    rope_queries,  # the same: descriptor of [R, P] boxes
    latents,  # [cache rows, L + P]: descriptor of [K, L] boxes
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
    groups: gl.constexpr = WARPS // 4
    NARROW: gl.constexpr = latents.dtype.primitive_bitwidth == 8
    dtype: gl.constexpr = gl.float16 if NARROW else latents.dtype
    if SWAP:
        score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, R // groups, 16])
        out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, R, 16])
        key_axis: gl.constexpr = 0
        row_axis: gl.constexpr = 1
        acc_shape: gl.constexpr = [L, R]
        score_shape: gl.constexpr = [K, R]
    else:
        score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, K // groups, 16])
        out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, 256, 16])
        key_axis: gl.constexpr = 1
        row_axis: gl.constexpr = 0
        acc_shape: gl.constexpr = [R, L]
        score_shape: gl.constexpr = [R, K]
    score_row: gl.constexpr = gl.SliceLayout(key_axis, score_layout)
    score_key: gl.constexpr = gl.SliceLayout(row_axis, score_layout)
    out_row: gl.constexpr = gl.SliceLayout(key_axis, out_layout)
    out_column: gl.constexpr = gl.SliceLayout(row_axis, out_layout)
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    weight_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for(score_shape, dtype)

    q_shared = gl.allocate_shared_memory(dtype, [R, L], wide)
    q_rope_shared = gl.allocate_shared_memory(dtype, [R, P], wide)
    k_shared = gl.allocate_shared_memory(latents.dtype, [STAGES, K, L], latents.layout)
    k_rope_shared = gl.allocate_shared_memory(latents.dtype, [STAGES, K, P], rope_keys.layout)
    if NARROW:
        k_wide = gl.allocate_shared_memory(dtype, [K, L], wide)
        k_rope_wide = gl.allocate_shared_memory(dtype, [K, P], wide)
    weights_shared = gl.allocate_shared_memory(dtype, score_shape, weight_shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(STAGES):
        mbarrier.init(ready.index(buffer), count=1)
    mbarrier.init(q_ready, count=1)
    fence_async_shared()

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
            block = gl.load(table + (begin + ahead) * K // PAGE, mask=ahead < num_tiles, other=0)
            _issue_tile(
                latents, rope_keys, block, begin + ahead, k_shared.index(free), k_rope_shared.index(free),
                ready.index(free), PAGE, K, L, P, ahead < num_tiles,
            )  # fmt: skip
        q_row = first_row * num_heads + first_tile_row
        if NARROW:
            num_used = num_rows * num_heads - first_tile_row
            _copy_queries(q, q_row, num_used, q_shared, 0, L + P, L, R, WARPS)
            _copy_queries(q, q_row, num_used, q_rope_shared, L, L + P, P, R, WARPS)
            fence_async_shared()
        else:
            mbarrier.expect(q_ready, R * (L + P) * 2)
            tma.async_copy_global_to_shared(queries, [q_row, 0], q_ready, q_shared)
            tma.async_copy_global_to_shared(rope_queries, [q_row, L], q_ready, q_rope_shared)

        token = (first_tile_row + gl.arange(0, R, score_row)) // num_heads
        last_key = length - num_rows + gl.minimum(token, num_rows - 1)
        key_in_tile = gl.arange(0, K, score_key)
        row_max = gl.full([R], NO_SCORE, gl.float32, score_row)
        row_sum = gl.zeros([R], gl.float32, score_row)
        acc = gl.zeros(acc_shape, gl.float32, out_layout)
        if not NARROW:
            mbarrier.wait(q_ready, segment & 1)
        for index in range(num_tiles):
            stage = (done + index) % STAGES
            tile = begin + index
            there = index + STAGES < num_tiles
            next_block = gl.load(table + (tile + STAGES) * K // PAGE, mask=there, other=0)
            k_tile = k_shared.index(stage)
            k_rope_tile = k_rope_shared.index(stage)
            mbarrier.wait(ready.index(stage), (done + index) // STAGES & 1)
            if NARROW:
                _widen_tile(k_tile, k_wide, length - tile * K, L, 128, WARPS)
                _widen_tile(k_rope_tile, k_rope_wide, length - tile * K, P, 64, WARPS)
                fence_async_shared()
                gl.thread_barrier()  # every warp has read this tile
                _issue_tile(
                    latents, rope_keys, next_block, tile + STAGES, k_tile, k_rope_tile, ready.index(stage),
                    PAGE, K, L, P, there,
                )  # fmt: skip
                k_tile = k_wide
                k_rope_tile = k_rope_wide
            elif (tile + 1) * K > length:
                _clear_unused(k_tile, length - tile * K, K, L, WARPS)
                fence_async_shared()
            scores = gl.zeros(score_shape, gl.float32, score_layout)
            if SWAP:
                scores = warpgroup_mma(k_tile, q_shared.permute((1, 0)), scores, use_acc=False, is_async=True)
                scores = warpgroup_mma(k_rope_tile, q_rope_shared.permute((1, 0)), scores, is_async=True)
            else:
                scores = warpgroup_mma(q_shared, k_tile.permute((1, 0)), scores, use_acc=False, is_async=True)
                scores = warpgroup_mma(q_rope_shared, k_rope_tile.permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
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
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, out_row), key_axis)
            if SWAP:
                acc = warpgroup_mma(k_tile.permute((1, 0)), weights_shared, acc, is_async=True)
            else:
                acc = warpgroup_mma(weights_shared, k_tile, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            gl.thread_barrier()  # every warp has read this tile
            if not NARROW:
                _issue_tile(
                    latents, rope_keys, next_block, tile + STAGES, k_tile, k_rope_tile, ready.index(stage),
                    PAGE, K, L, P, there,
                )  # fmt: skip
        done += num_tiles

        tile_row = first_tile_row + gl.arange(0, R, score_row)
        exists = tile_row < num_rows * num_heads
        seen = row_sum > 0.0
        safe_sum = gl.where(seen, row_sum, 1.0)
        log_sum = gl.where(seen, row_max + gl.log2(safe_sum), float("-inf"))
        factor = gl.convert_layout(gl.where(seen, kv_scale / safe_sum, 0.0), out_row)
        acc = acc * gl.expand_dims(factor, key_axis)
        out_tile_row = first_tile_row + gl.arange(0, R, out_row)
        out_exists = gl.expand_dims(out_tile_row < num_rows * num_heads, key_axis)
        column = gl.expand_dims(gl.arange(0, L, out_column), row_axis)
        if slot < 0:
            base = first_row.to(gl.int64) * num_heads
            place = gl.expand_dims(base + out_tile_row, key_axis) * L + column
            gl.store(out + place, acc.to(out.dtype.element_ty), mask=out_exists)
            if LSE:
                gl.store(lse + base + tile_row, log_sum * LN2, mask=exists)
        else:
            base = (slot.to(gl.int64) * team_size + member) * R - first_tile_row
            place = gl.expand_dims(base + out_tile_row, key_axis) * L + column
            gl.store(part_out + place, acc, mask=out_exists)
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
    rows = geometry.tile_rows
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    queries = q.contiguous().view(-1, latent_dim)
    cache_rows = latent_cache.view(-1, latent_dim)
    narrow = latent_cache.dtype.itemsize == 1
    # A box of the copy engine's 128-byte swizzle: 64 rope columns fill only half of one in float8.
    latent_layout = gl.NVMMASharedLayout(128, 8, 2) if narrow else layout
    rope_layout = gl.NVMMASharedLayout(64, 8, 2) if narrow else layout
    num_warps = NUM_WARPS[rows]
    attend_hopper_kernel[(geometry.num_teams * geometry.team_size,)](
        queries,
        TensorDescriptor.from_tensor(queries, [rows, kv_lora_rank], layout),
        TensorDescriptor.from_tensor(queries, [rows, rope_dim], layout),
        TensorDescriptor.from_tensor(cache_rows, [TILE_KEYS, kv_lora_rank], latent_layout),
        TensorDescriptor.from_tensor(cache_rows, [TILE_KEYS, rope_dim], rope_layout),
        block_table, records, out, lse, part_out, part_lse,
        block_table.stride(0), geometry.num_heads, geometry.num_teams, geometry.team_size,
        scale, kv_scale,
        L=kv_lora_rank, P=rope_dim, PAGE=block_size, R=rows, K=TILE_KEYS, SWAP=rows < 64,
        LSE=lse is not None, STAGES=2, WARPS=num_warps, num_warps=num_warps,
    )  # fmt: skip
