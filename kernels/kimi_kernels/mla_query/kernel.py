"""`mla_query` in Triton-language: product, rotation and the row they share in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.mla_query.op import check_query
from kimi_kernels.rope.kernel import load_pairs, store_pairs

COLUMNS = 128
"""Latent columns of a program: with 64 heads, two programs a multiprocessor even for one row."""
MOST_ROWS = 64


@triton.jit(do_not_specialize=["num_tokens"])
def mla_query_kernel(
    q,  # [T, heads, nope + 2 * pairs], last dimension contiguous
    w_uk,  # [heads, nope, latent]
    cos_sin,  # [max positions, 2 * pairs] float32
    positions,  # [T] int64
    out,  # [T, heads, latent + 2 * pairs], contiguous
    num_tokens,
    token_stride,
    head_stride,
    num_heads,
    nope,
    latent,
    num_pairs,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NOPE: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a head, COLUMNS latent columns and ROWS rows; those of the first columns rotate as well."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, NOPE)
    # The weight does not depend on the kernel before, so it is read while that one ends.
    weight = tl.load(
        w_uk + (head * nope + depth[:, None]) * latent + column[None, :],
        mask=(depth < nope)[:, None] & (column < latent)[None, :],
        other=0.0,
    )
    if PDL:
        gdc_wait()
    row = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_tokens
    source = q + row[:, None] * token_stride + head * head_stride
    values = tl.load(source + depth[None, :], mask=is_row[:, None] & (depth < nope)[None, :], other=0.0)
    product = tl.dot(values, weight, input_precision="ieee")
    width = latent + 2 * num_pairs
    target = out + (row[:, None] * num_heads + head) * width
    is_out = is_row[:, None] & (column < latent)[None, :]
    tl.store(target + column[None, :], product.to(out.dtype.element_ty), mask=is_out)
    if tl.program_id(1) == 0:
        pair = tl.arange(0, PAIRS)
        mask = is_row[:, None] & (pair < num_pairs)[None, :]
        position = tl.load(positions + row, mask=is_row, other=0)
        angles = cos_sin + position[:, None] * (2 * num_pairs) + pair[None, :]
        cos = tl.load(angles, mask=mask, other=0.0)
        sin = tl.load(angles + num_pairs, mask=mask, other=0.0)
        first, second = load_pairs(source + nope, pair[None, :], INTERLEAVED, num_pairs, mask)
        store_pairs(
            target + latent,
            pair[None, :],
            first * cos - second * sin,
            second * cos + first * sin,
            INTERLEAVED,
            num_pairs,
            mask,
        )


def mla_query(q: Tensor, w_uk: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """`MlaQuery`."""
    check_query(q, w_uk, cos_sin, positions)
    num_heads, nope, latent = w_uk.shape
    num_tokens, rope = q.shape[0], q.shape[2] - nope
    out = torch.empty(num_tokens, num_heads, latent + rope, dtype=q.dtype, device=q.device)
    if out.numel():
        rows = min(MOST_ROWS, max(16, triton.next_power_of_2(num_tokens)))
        columns = min(COLUMNS, max(16, triton.next_power_of_2(latent)))
        column_tiles = triton.cdiv(latent, columns)
        mla_query_kernel[(num_heads, column_tiles, triton.cdiv(num_tokens, rows))](
            q, w_uk, cos_sin, positions, out, num_tokens, q.stride(0), q.stride(1), num_heads, nope, latent,
            rope // 2, INTERLEAVED=interleaved, ROWS=rows, COLUMNS=columns,
            NOPE=max(16, triton.next_power_of_2(nope)), PAIRS=triton.next_power_of_2(rope // 2), num_warps=4,
            **pdl_options(q.device),
        )  # fmt: skip
    return out
