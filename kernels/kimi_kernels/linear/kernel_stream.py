# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""A plain weight times few rows on Hopper (sm_90), in Gluon: the weight streams through shared memory.

The time is that of reading the weight once, so what counts is how many bytes are on their way, and how soon. A program
keeps a ring of tiles full by bulk copies, up to 200 KB a multiprocessor, and fills it before the rows are there: the
weight depends on no kernel, so its first tiles arrive while the kernel before still runs. Triton-language's own
pipelining cannot begin before the wait. A weight of few rows is cut along its columns too; the last of a tile's
programs to finish sums the parts, always in the same order.
"""

import torch
import triton
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

from kimi_kernels.linear.stream_launch import StreamLaunch

SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def ask_for(weights, xs, place, weight_tile, x_tile, arrived, there, WEIGHTS: gl.constexpr, ROWS: gl.constexpr):
    """Start copying the tiles at `place`, (weight row, column), of the weight, of the rows or of both."""
    row, column = place
    if WEIGHTS:
        # Both tiles are expected with the first, whenever the second is asked for.
        mbarrier.expect(arrived, weights.block_type.nbytes + xs.block_type.nbytes, pred=there)
        tma.async_copy_global_to_shared(weights, [row, column], arrived, weight_tile, pred=there)
    if ROWS:
        tma.async_copy_global_to_shared(xs, [0, column], arrived, x_tile, pred=there)


@gluon.jit
def store_or_sum(
    acc, OUT, PARTIALS, ARRIVALS, tile, split, num_rows, out_features, TILE_ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    SPLITS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write a tile of the result; if its weight is cut, store this part, and the last program to do so sums all."""
    row = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    target = OUT + column.to(gl.int64)[None, :] * out_features + (tile * TILE_ROWS + row)[:, None]
    mask = (tile * TILE_ROWS + row < out_features)[:, None] & (column < num_rows)[None, :]
    if SPLITS == 1:
        gl.store(target, acc.to(OUT.dtype.element_ty), mask=mask)
    else:
        size: gl.constexpr = TILE_ROWS * COLUMNS
        parts = PARTIALS + tile.to(gl.int64) * (SPLITS * size) + row[:, None] * COLUMNS + column[None, :]
        gl.store(parts + split * size, acc, mask=mask)
        # Every thread's store must come before the count that announces it.
        gl.thread_barrier()
        if gl.atomic_add(ARRIVALS + tile, 1, sem="acq_rel") == SPLITS - 1:
            gl.store(ARRIVALS + tile, 0)
            total = gl.zeros([TILE_ROWS, COLUMNS], gl.float32, LAYOUT)
            for part in gl.static_range(SPLITS):
                # .cg: another multiprocessor wrote them, so this one's L1 must not answer.
                total += gl.load(parts + part * size, mask=mask, other=0.0, cache_modifier=".cg")
            gl.store(target, total.to(OUT.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["num_rows", "in_features", "out_features"])
def stream_linear_kernel(
    weights,  # [out_features, in_features]: descriptor of [TILE_ROWS, STEP] boxes
    xs,  # [num_rows, in_features]: descriptor of [COLUMNS, STEP] boxes
    OUT,  # [num_rows, out_features], contiguous
    PARTIALS,  # [tiles, SPLITS, TILE_ROWS, COLUMNS] float32, scratch
    ARRIVALS,  # [tiles] int32, zero, and zero at the end
    num_rows,
    in_features,
    out_features,
    TILE_ROWS: gl.constexpr,
    STEP: gl.constexpr,
    COLUMNS: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One program TILE_ROWS rows of the weight and one of SPLITS ranges of its columns, all rows of x; four warps.

    Boxes that reach past an edge are filled up with zeros, so sizes need not divide.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    weight_ring = gl.allocate_shared_memory(weights.dtype, [STAGES, TILE_ROWS, STEP], weights.layout)
    x_ring = gl.allocate_shared_memory(xs.dtype, [STAGES, COLUMNS, STEP], xs.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gdc_launch_dependents()
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
    fence_async_shared()
    tile = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    num_steps = (in_features + STEP - 1) // STEP
    first = split * num_steps // SPLITS
    count = (split + 1) * num_steps // SPLITS - first
    for slot in gl.static_range(STAGES):
        place = (tile * TILE_ROWS, (first + slot) * STEP)
        ask_for(weights, xs, place, weight_ring.index(slot), x_ring.index(slot), ready.index(slot), slot < count,
                True, False)  # fmt: skip
    gdc_wait()
    for slot in gl.static_range(STAGES):
        place = (tile * TILE_ROWS, (first + slot) * STEP)
        ask_for(weights, xs, place, weight_ring.index(slot), x_ring.index(slot), ready.index(slot), slot < count,
                False, True)  # fmt: skip
    acc = gl.zeros([TILE_ROWS, COLUMNS], gl.float32, layout)
    for step in range(count):
        at = step % STAGES
        weight_tile = weight_ring.index(at)
        x_tile = x_ring.index(at)
        arrived = ready.index(at)
        mbarrier.wait(arrived, step // STAGES & 1)
        acc = warpgroup_mma(weight_tile, x_tile.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()  # every warp has read the tiles
        place = (tile * TILE_ROWS, (first + step + STAGES) * STEP)
        ask_for(weights, xs, place, weight_tile, x_tile, arrived, step + STAGES < count, True, True)
    for slot in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(slot))
    store_or_sum(acc, OUT, PARTIALS, ARRIVALS, tile, split, num_rows, out_features, TILE_ROWS, COLUMNS, SPLITS, layout)


def stream_linear(
    x: Tensor, weight: Tensor, arrivals: Tensor, launch: StreamLaunch, dtype: torch.dtype | None = None
) -> Tensor:
    """x @ weight.T, summed in float32 in an order that depends on the launch's splits alone.

    Args:
        x: [T, in_features] bf16 or fp16, 1 <= T <= launch.columns; 16-byte aligned rows, last dimension contiguous.
        weight: [out_features, in_features] of x's dtype, contiguous, in_features a multiple of 8.
        arrivals: [at least the tiles] int32, zeros, of this weight alone.
        dtype: of the result; x's unless given.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    out = torch.empty(num_rows, out_features, dtype=dtype or x.dtype, device=x.device)
    tiles = triton.cdiv(out_features, launch.tile_rows)
    scratch = tiles * launch.splits * launch.tile_rows * launch.columns if launch.splits > 1 else 0
    stream_linear_kernel[(tiles * launch.splits,)](
        TensorDescriptor.from_tensor(weight, [launch.tile_rows, launch.step], SWIZZLED),
        TensorDescriptor.from_tensor(x, [launch.columns, launch.step], SWIZZLED), out,
        torch.empty(scratch, dtype=torch.float32, device=x.device) if scratch else out, arrivals, num_rows,
        in_features, out_features, TILE_ROWS=launch.tile_rows, STEP=launch.step, COLUMNS=launch.columns,
        SPLITS=launch.splits, STAGES=launch.stages, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out
