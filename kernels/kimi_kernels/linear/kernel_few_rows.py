# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""A plain weight times up to 16 rows: each program reads some rows of the weight from end to end.

The time is that of reading the weight once, so what counts is how many bytes are on their way and how soon: no split
along the columns and no second kernel, and programs that start while the kernel before still runs.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.early_start import starts_early

MOST_ROWS = 16
INTERPRETED = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class FewRowsLaunch:
    """Sizes that change the time and nothing else."""

    weight_rows: int
    """Rows of the weight a program."""
    step: int
    """Columns at a time."""
    stages: int
    warps: int = 4
    ahead: int = 0
    """Bytes of each row, a multiple of 16, asked for while the kernel before still runs."""


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
    num_rows,
    in_features,
    out_features,
    x_stride,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,  # whole tiles of rows and whole steps
    PORTABLE: tl.constexpr,
    AHEAD: tl.constexpr,  # bytes of each row
    PDL: tl.constexpr,
):
    """One program ROWS rows of the weight; COLUMNS is num_rows rounded up."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if PDL:
        gdc_launch_dependents()
        if AHEAD:
            _ask_for_rows(WEIGHT, row, in_features, out_features, ROWS, AHEAD)
        gdc_wait()
    column = tl.arange(0, COLUMNS)
    is_row, is_column = row < out_features, column < num_rows
    weights = WEIGHT + row.to(tl.int64)[:, None] * in_features
    xs = X + column.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, in_features, STEP, num_stages=STAGES):
        k = first + tl.arange(0, STEP)
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
    tl.store(target, acc.to(OUT.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def few_rows_linear(x: Tensor, weight: Tensor, launch: FewRowsLaunch) -> Tensor:
    """x @ weight.T.

    Args:
        x: [T, in_features], T from 1 to MOST_ROWS, last dimension contiguous.
        weight: [out_features, in_features], contiguous, of x's dtype.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    out = x.new_empty(num_rows, out_features)
    early = starts_early(x.device)
    few_rows_kernel[(triton.cdiv(out_features, launch.weight_rows),)](
        x,
        weight,
        out,
        num_rows,
        in_features,
        out_features,
        x.stride(0),
        ROWS=launch.weight_rows,
        STEP=launch.step,
        COLUMNS=8 if num_rows <= 8 else 16,
        STAGES=launch.stages,
        EVEN=out_features % launch.weight_rows == 0 and in_features % launch.step == 0,
        PORTABLE=INTERPRETED,
        AHEAD=min(launch.ahead, in_features * 2 // 1024 * 1024),
        PDL=early,
        num_warps=launch.warps,
        **({"launch_pdl": True} if early else {}),
    )
    return out
