"""Pieces of `attend_hopper_kernel` for latents of 16 bits: loads and products of one tile. Notation as there.

Latents lie in shared memory as two halves of their columns, so that half a tile is being loaded again while the other
half is still multiplied. Shared buffers go together: queries' first half, second half, rope part, and keys' likewise.
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

from kimi_kernels.mla_decode.kernel_hopper_segments import clear_unused


@gluon.jit
def allocate(latents, rope_keys, R: gl.constexpr, STAGES: gl.constexpr):
    K: gl.constexpr = latents.block_type.shape[0]
    H: gl.constexpr = latents.block_type.shape[1]
    P: gl.constexpr = rope_keys.block_type.shape[1]
    q1 = gl.allocate_shared_memory(latents.dtype, [R, H], latents.layout)
    q2 = gl.allocate_shared_memory(latents.dtype, [R, H], latents.layout)
    qr = gl.allocate_shared_memory(latents.dtype, [R, P], rope_keys.layout)
    k1 = gl.allocate_shared_memory(latents.dtype, [STAGES, K, H], latents.layout)
    k2 = gl.allocate_shared_memory(latents.dtype, [STAGES, K, H], latents.layout)
    kr = gl.allocate_shared_memory(latents.dtype, [STAGES, K, P], rope_keys.layout)
    return q1, q2, qr, k1, k2, kr


@gluon.jit
def load_queries(queries, rope_queries, row, shared, ready, there):
    """Start copying a tile of query rows."""
    H: gl.constexpr = queries.block_type.shape[1]
    mbarrier.expect(ready, 2 * queries.block_type.nbytes + rope_queries.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(queries, [row, 0], ready, shared[0], pred=there)
    tma.async_copy_global_to_shared(queries, [row, H], ready, shared[1], pred=there)
    tma.async_copy_global_to_shared(rope_queries, [row, 2 * H], ready, shared[2], pred=there)


@gluon.jit
def find_tile(latents, table, begin, num_tiles, ahead, PAGE: gl.constexpr):
    """(the cache row that tile `ahead` of a segment starts at, whether the segment has that many)."""
    there = ahead < num_tiles
    key = (begin + ahead) * latents.block_type.shape[0]
    return gl.load(table + key // PAGE, mask=there, other=0) * PAGE + key % PAGE, there


@gluon.jit
def load_first(latents, rope_keys, row, shared, stage, ready, there):
    """Start copying the first half of a tile's columns and its rope part; `ready` waits for the second half too."""
    arrived = ready.index(stage)
    mbarrier.expect(arrived, 2 * latents.block_type.nbytes + rope_keys.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(latents, [row, 0], arrived, shared[3].index(stage), pred=there)
    rope_column: gl.constexpr = 2 * latents.block_type.shape[1]
    tma.async_copy_global_to_shared(rope_keys, [row, rope_column], arrived, shared[5].index(stage), pred=there)


@gluon.jit
def load_second(latents, row, shared, stage, ready, there):
    """Start copying the second half."""
    H: gl.constexpr = latents.block_type.shape[1]
    tma.async_copy_global_to_shared(latents, [row, H], ready.index(stage), shared[4].index(stage), pred=there)


@gluon.jit
def load_step(latents, rope_keys, table, begin, num_tiles, step, stage, shared, ready, PAGE: gl.constexpr):
    """Start copying a tile of a segment, if it has that many."""
    row, there = find_tile(latents, table, begin, num_tiles, step, PAGE)
    load_first(latents, rope_keys, row, shared, stage, ready, there)
    load_second(latents, row, shared, stage, ready, there)


@gluon.jit
def multiply_keys(shared, stage, num_used, layout: gl.constexpr, SWAP: gl.constexpr, WARPS: gl.constexpr):
    """Queries . keys of a tile, then the tile cleared past its `num_used` keys: [R, K], or [K, R] if SWAP."""
    k1 = shared[3].index(stage)
    k2 = shared[4].index(stage)
    K: gl.constexpr = k1.shape[0]
    R: gl.constexpr = shared[0].shape[0]
    if SWAP:
        scores = gl.zeros([K, R], gl.float32, layout)
    else:
        scores = gl.zeros([R, K], gl.float32, layout)
    scores = _multiply(shared[0], k1, scores, True, SWAP)
    scores = _multiply(shared[2], shared[5].index(stage), scores, False, SWAP)
    scores = _multiply(shared[1], k2, scores, False, SWAP)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if num_used < K:
        clear_unused(k1, num_used, WARPS)
        clear_unused(k2, num_used, WARPS)
        fence_async_shared()
    return scores


@gluon.jit
def _multiply(queries, keys, scores, FRESH: gl.constexpr, SWAP: gl.constexpr):
    """scores += queries . keys over some columns, not waited for."""
    if SWAP:
        return warpgroup_mma(keys, queries.permute((1, 0)), scores, use_acc=not FRESH, is_async=True)
    else:
        return warpgroup_mma(queries, keys.permute((1, 0)), scores, use_acc=not FRESH, is_async=True)


@gluon.jit
def multiply_values(shared, stage, weights, acc1, acc2, latents, rope_keys, next_row, there, ready,
                    SWAP: gl.constexpr):  # fmt: skip
    """Add weights . values to the result's two halves; start copying the tile that follows into each half once read."""
    acc1 = _accumulate(weights, shared[3].index(stage), acc1, SWAP)
    acc2 = _accumulate(weights, shared[4].index(stage), acc2, SWAP)
    acc1 = warpgroup_mma_wait(1, deps=[acc1])
    gl.thread_barrier()  # every warp has read the first half
    load_first(latents, rope_keys, next_row, shared, stage, ready, there)
    acc2 = warpgroup_mma_wait(0, deps=[acc2])
    gl.thread_barrier()
    load_second(latents, next_row, shared, stage, ready, there)
    return acc1, acc2


@gluon.jit
def _accumulate(weights, values, acc, SWAP: gl.constexpr):
    """acc += weights . values over some columns, not waited for: [R, H], or [H, R] if SWAP."""
    if SWAP:
        return warpgroup_mma(values.permute((1, 0)), weights, acc, is_async=True)
    else:
        return warpgroup_mma(weights, values, acc, is_async=True)
