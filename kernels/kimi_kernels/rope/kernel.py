"""The rotary embedding in Triton-language, float32 inside."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.rope.op import check_rope

HEADS_A_PROGRAM = 16


@triton.jit
def load_pairs(x, columns, INTERLEAVED: tl.constexpr, num_pairs, mask):
    """The two members of every pair, float32. columns: [PAIRS] pair numbers, broadcast against x and mask."""
    if INTERLEAVED:
        first = tl.load(x + 2 * columns, mask=mask, other=0.0)
        second = tl.load(x + 2 * columns + 1, mask=mask, other=0.0)
    else:
        first = tl.load(x + columns, mask=mask, other=0.0)
        second = tl.load(x + columns + num_pairs, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_pairs(x, columns, first, second, INTERLEAVED: tl.constexpr, num_pairs, mask):
    """The counterpart of `load_pairs`."""
    if INTERLEAVED:
        tl.store(x + 2 * columns, first.to(x.dtype.element_ty), mask=mask)
        tl.store(x + 2 * columns + 1, second.to(x.dtype.element_ty), mask=mask)
    else:
        tl.store(x + columns, first.to(x.dtype.element_ty), mask=mask)
        tl.store(x + columns + num_pairs, second.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def rope_kernel(
    x,  # [T, heads, 2 * pairs], last dimension contiguous
    cos_sin,  # [max positions, 2 * pairs] float32
    positions,  # [T] int64
    out,  # [T, heads, 2 * pairs], contiguous
    token_stride,
    head_stride,
    num_heads,
    num_pairs,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, PAIRS)
    there = pair < num_pairs
    angles = cos_sin + tl.load(positions + token) * (2 * num_pairs) + pair
    cos = tl.load(angles, mask=there, other=0.0)[None, :]
    sin = tl.load(angles + num_pairs, mask=there, other=0.0)[None, :]
    mask = (head < num_heads) & there[None, :]
    source = x + token * token_stride + head * head_stride
    first, second = load_pairs(source, pair[None, :], INTERLEAVED, num_pairs, mask)
    target = out + (token * num_heads + head) * (2 * num_pairs)
    store_pairs(
        target, pair[None, :], first * cos - second * sin, second * cos + first * sin, INTERLEAVED, num_pairs, mask
    )


def rope(x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """`Rope`."""
    check_rope(x, cos_sin, positions)
    num_tokens, num_heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        heads = min(HEADS_A_PROGRAM, triton.next_power_of_2(num_heads))
        rope_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
            x, cos_sin, positions, out, x.stride(0), x.stride(1), num_heads, width // 2, INTERLEAVED=interleaved,
            PAIRS=triton.next_power_of_2(width // 2), HEADS=heads, num_warps=4 if heads > 4 else 1,
            **pdl_options(x.device),
        )  # fmt: skip
    return out
