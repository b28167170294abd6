# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""A plain weight times few rows: each program reads some rows of the weight, from end to end or a part of the columns.

The time is that of reading the weight once, so what counts is how many bytes are on their way and how soon: programs
start while the kernel before still runs, and where a weight has few rows the last of its programs to finish adds up
what the others have.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.early_start import starts_early

MOST_COLUMNS = 64
INTERPRETED = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class FewRowsLaunch:
    """Sizes that change the time and nothing else but the order of sums."""

    weight_rows: int
    """Rows of the weight a program."""
    step: int
    """Columns at a time."""
    stages: int
    warps: int = 4
    ahead: int = 0
    """Bytes of each row, a multiple of 1024, asked for while the kernel before still runs."""
    splits: int = 1
    """Parts of the columns, each a program's."""


@triton.jit
def _ask_for_rows(WEIGHT, row, in_features, out_features, ROWS: tl.constexpr, AHEAD: tl.constexpr):
    """Have the first AHEAD bytes of some rows brought into the L2 cache."""
    PARTS: tl.constexpr = 128 // ROWS if ROWS < 128 else 1
    inside = tl.minimum(row, out_features - 1).to(tl.int64) * in_features
    part = tl.arange(0, PARTS) * (AHEAD // PARTS // 2)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [(WEIGHT + inside[:, None] + part[None, :]).to(tl.int64), tl.full([ROWS, PARTS], AHEAD // PARTS, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def few_rows_kernel(
    X,  # [num_rows, in_features], last dimension contiguous
    WEIGHT,  # [out_features, in_features], contiguous
    OUT,  # [num_rows, out_features], contiguous
    PARTIALS,  # [tiles, SPLITS, ROWS, COLUMNS] float32, scratch
    ARRIVALS,  # [tiles] int32, zero, and zero at the end
    num_rows,
    in_features,
    out_features,
    x_stride,
    num_column_tiles,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,  # whole tiles of rows and whole steps
    PORTABLE: tl.constexpr,
    AHEAD: tl.constexpr,  # bytes of each row
    PDL: tl.constexpr,
):
    """One program ROWS rows of the weight, COLUMNS rows of X, one of SPLITS ranges of the weight's columns."""
    program = tl.program_id(0)
    split = program % SPLITS
    tile = program // SPLITS
    row = tile // num_column_tiles * ROWS + tl.arange(0, ROWS)
    if PDL:
        gdc_launch_dependents()
        if AHEAD:
            _ask_for_rows(WEIGHT, row, in_features, out_features, ROWS, AHEAD)
        gdc_wait()
    column = tile % num_column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < out_features, column < num_rows
    weights = WEIGHT + row.to(tl.int64)[:, None] * in_features
    xs = X + column.to(tl.int64)[:, None] * x_stride
    num_steps = tl.cdiv(in_features, STEP)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.range(split * num_steps // SPLITS, (split + 1) * num_steps // SPLITS, num_stages=STAGES):
        k = step * STEP + tl.arange(0, STEP)
        if EVEN:
            weight = tl.load(weights + k[None, :])
            x = tl.load(xs + k[None, :], mask=is_column[:, None], other=0.0)
        else:
            is_inside = k < in_features
            weight = tl.load(weights + k[None, :], mask=is_row[:, None] & is_inside[None, :], other=0.0)
            x = tl.load(xs + k[None, :], mask=is_column[:, None] & is_inside[None, :], other=0.0)
        if PORTABLE:
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(weight, tl.trans(x), acc)
    target = OUT + column.to(tl.int64)[None, :] * out_features + row[:, None]
    mask = is_row[:, None] & is_column[None, :]
    if SPLITS == 1:
        tl.store(target, acc.to(OUT.dtype.element_ty), mask=mask)
    else:
        place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        partials = PARTIALS + tile.to(tl.int64) * (SPLITS * ROWS * COLUMNS) + place
        tl.store(partials + split * (ROWS * COLUMNS), acc)
        # Every thread's store must come before the count that announces it.
        tl.debug_barrier()
        if tl.atomic_add(ARRIVALS + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(ARRIVALS + tile, 0)
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            for part in tl.static_range(SPLITS):
                # .cg: another multiprocessor wrote them, so this one's L1 must not answer.
                total += tl.load(partials + part * (ROWS * COLUMNS), cache_modifier=".cg")
            tl.store(target, total.to(OUT.dtype.element_ty), mask=mask)


def few_rows_linear(
    x: Tensor, weight: Tensor, launch: FewRowsLaunch, arrivals: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """x @ weight.T, summed in float32.

    Args:
        x: [T, in_features], T at least 1, last dimension contiguous.
        weight: [out_features, in_features], contiguous, of x's dtype.
        arrivals: [at least the tiles] int32, zeros, of this weight alone; only where the launch splits.
        dtype: of the result; x's unless given.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    out = torch.empty(num_rows, out_features, dtype=dtype or x.dtype, device=x.device)
    columns = min(MOST_COLUMNS, max(8, triton.next_power_of_2(num_rows)))
    column_tiles = triton.cdiv(num_rows, columns)
    tiles = triton.cdiv(out_features, launch.weight_rows) * column_tiles
    scratch = tiles * launch.splits * launch.weight_rows * columns if launch.splits > 1 else 0
    early = starts_early(x.device)
    few_rows_kernel[(tiles * launch.splits,)](
        x,
        weight,
        out,
        torch.empty(scratch, dtype=torch.float32, device=x.device),
        out if arrivals is None else arrivals,
        num_rows,
        in_features,
        out_features,
        x.stride(0),
        column_tiles,
        ROWS=launch.weight_rows,
        STEP=launch.step,
        COLUMNS=columns,
        SPLITS=launch.splits,
        STAGES=launch.stages,
        EVEN=out_features % launch.weight_rows == 0 and in_features % launch.step == 0,
        PORTABLE=INTERPRETED,
        AHEAD=min(launch.ahead, in_features * 2 // 1024 * 1024),
        PDL=early,
        num_warps=launch.warps,
        **({"launch_pdl": True} if early else {}),
    )
    return out
