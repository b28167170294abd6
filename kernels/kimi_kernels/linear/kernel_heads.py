# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""`per_head_linear` for few rows in Triton-language: a head's weight is read while the kernel before still runs."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.dependent_launch import pdl_options

MOST_ROWS = 64
MOST_DEPTH = 512
"""Widest heads: a program keeps COLUMNS of a head's weight in registers."""
COLUMNS = 32


@triton.jit(do_not_specialize=["num_tokens"])
def head_linear_kernel(
    x,  # [T, heads, depth], last dimension contiguous
    weight,  # [heads, depth, width]
    out,  # [T, heads, width], contiguous
    num_tokens,
    token_stride,
    head_stride,
    num_heads,
    depth,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a head, COLUMNS of its result and ROWS rows."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    values = tl.load(
        weight + (head * depth + inner[:, None]) * width + column[None, :],
        mask=(inner < depth)[:, None] & (column < width)[None, :],
        other=0.0,
    )
    if PDL:
        gdc_wait()
    row = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_tokens
    source = x + row[:, None] * token_stride + head * head_stride + inner[None, :]
    rows = tl.load(source, mask=is_row[:, None] & (inner < depth)[None, :], other=0.0)
    product = tl.dot(rows, values, input_precision="ieee")
    target = out + (row[:, None] * num_heads + head) * width + column[None, :]
    tl.store(target, product.to(out.dtype.element_ty), mask=is_row[:, None] & (column < width)[None, :])


def takes_heads(x: Tensor, weight: Tensor) -> bool:
    """Tell whether `head_linear` is for these: few rows, on a device that starts kernels early."""
    fits = 0 < x.shape[0] <= MOST_ROWS and weight.shape[1] <= MOST_DEPTH and x.stride(2) == 1
    return fits and weight.is_contiguous()


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x: [T, N, in_features]; weight: [N, in_features, out_features] that `takes_heads` -> [T, N, out_features]."""
    num_tokens = x.shape[0]
    num_heads, depth, width = weight.shape
    out = torch.empty(num_tokens, num_heads, width, dtype=x.dtype, device=x.device)
    rows = max(16, triton.next_power_of_2(num_tokens))
    head_linear_kernel[(num_heads, triton.cdiv(width, COLUMNS), triton.cdiv(num_tokens, rows))](
        x, weight, out, num_tokens, x.stride(0), x.stride(1), num_heads, depth, width, ROWS=rows, COLUMNS=COLUMNS,
        DEPTH=max(16, triton.next_power_of_2(depth)), num_warps=4, **pdl_options(x.device),
    )  # fmt: skip
    return out
