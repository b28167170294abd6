# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""`mla_values` in Triton-language: pieces of a sequence are merged by the programs that multiply them with W_uv."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.linear.kernel import per_head_linear
from kimi_kernels.linear.kernel_heads import COLUMNS, takes_heads
from kimi_kernels.mla_decode.attend_call import AttendCall
from kimi_kernels.mla_decode.kernel import attend_pieces, merge_pieces
from kimi_kernels.mla_decode.kernel_attend import NO_SCORE
from kimi_kernels.mla_decode.kernel_plan import ENTRY

PIECES = 16
"""Pieces that a program reads at a time; also the fewest rows of a product, up to which a row is repeated."""
MOST_PROGRAMS = 132
"""Every program reads its columns of W_uv: with more of them than multiprocessors, a kernel for each op is faster."""


@triton.jit(do_not_specialize=["num_tokens"])
def merge_values_kernel(
    latents,  # [T, heads, L]: of sequences in one piece
    part_out,  # [slots * item_rows, L] float32
    part_lse,  # [slots * item_rows] float32, base 2
    entries,  # of the plan
    w_uv,  # [heads, L, width]
    values,  # [T, heads, width]
    num_tokens,
    num_heads,
    width,
    item_rows,
    L: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    ITEMS: tl.constexpr,  # most of the plan, each a sequence
    PDL: tl.constexpr,
):
    """One program a head, COLUMNS of its values and a token."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(2)
    inner = tl.arange(0, L)
    weight = tl.load(
        w_uv + (head.to(tl.int64) * L + inner[:, None]) * width + column[None, :],
        mask=(column < width)[None, :],
        other=0.0,
    )
    # The plan was there before the attending kernel let this one start. Past L1, which could hold an older one.
    num_items = tl.load(entries, cache_modifier=".cg")
    item = tl.arange(0, ITEMS)
    is_item = item < num_items
    first_row = tl.load(entries + (1 + item) * ENTRY, mask=is_item, other=0, cache_modifier=".cg")
    num_rows = tl.load(entries + (1 + item) * ENTRY + 1, mask=is_item, other=0, cache_modifier=".cg")
    own = tl.sum((is_item & (first_row + num_rows <= token)).to(tl.int32), 0)
    # Padding rows, which no sequence owns, become 0, so that nothing downstream meets stale memory.
    exists = own < num_items
    entry = entries + (1 + own) * ENTRY
    row = (token - tl.load(entry, mask=exists, other=0, cache_modifier=".cg")) * num_heads + head
    first_slot = tl.load(entry + 3, mask=exists, other=0, cache_modifier=".cg")
    num_slots = tl.load(entry + 4, mask=exists, other=0, cache_modifier=".cg")
    if PDL:
        gdc_wait()
    at = (token.to(tl.int64) * num_heads + head) * L + inner
    rows = tl.load(latents + at, mask=(inner < L) & exists & (num_slots <= 1), other=0.0)
    if num_slots > 1:
        total_max = tl.max(tl.full([PIECES], NO_SCORE, tl.float32), 0)
        total = 0.0
        acc = tl.zeros([L], tl.float32)
        for begin in range(0, num_slots, PIECES):
            piece = begin + tl.arange(0, PIECES)
            there = piece < num_slots
            part_row = (first_slot + 2 * piece + (piece == 0).to(tl.int32)).to(tl.int64) * item_rows + row
            log_sum = tl.load(part_lse + part_row, mask=there, other=float("-inf"))
            part = tl.load(part_out + part_row[:, None] * L + inner[None, :], mask=there[:, None], other=0.0)
            new_max = tl.maximum(total_max, tl.max(log_sum, 0))
            shrink = tl.exp2(total_max - new_max)
            share = tl.exp2(log_sum - new_max)
            total = total * shrink + tl.sum(share, 0)
            acc = acc * shrink + tl.sum(part * share[:, None], 0)
            total_max = new_max
        rows = (acc / tl.where(total > 0.0, total, 1.0)).to(latents.dtype.element_ty)
    product = tl.dot(tl.broadcast_to(rows[None, :], [PIECES, L]), weight, input_precision="ieee")
    first = tl.sum(tl.where(tl.arange(0, PIECES)[:, None] == 0, product, 0.0), 0)
    target = values + (token.to(tl.int64) * num_heads + head) * width + column
    tl.store(target, first.to(values.dtype.element_ty), mask=column < width)


def mla_values(
    q: Tensor,
    latent_cache: Tensor,
    batch: AttentionBatch,
    w_uv: Tensor,
    softmax_scale: float,
    kv_scale: float = 1.0,
) -> Tensor:
    """`MlaValues`. Few rows are merged and multiplied in one launch."""
    call = attend_pieces(q, latent_cache, batch, w_uv.shape[1], softmax_scale, kv_scale)
    if call is None:
        return q.new_zeros(q.shape[0], w_uv.shape[0], w_uv.shape[2])
    if _fits(call, w_uv):
        return _merge_values(call, w_uv)
    merge_pieces(call)
    return per_head_linear(call.out, w_uv)


def _fits(call: AttendCall, w_uv: Tensor) -> bool:
    num_tokens, num_heads, _ = call.out.shape
    # So few rows are at most three tiles of a sequence, and a team takes more: each sequence is one item of the plan.
    is_small = num_tokens * num_heads * triton.cdiv(w_uv.shape[2], COLUMNS) <= MOST_PROGRAMS
    fits = takes_heads(call.out, w_uv) and call.out.shape[1:] == w_uv.shape[:2]
    return is_small and fits and not call.geometry.split_tokens


def _merge_values(call: AttendCall, w_uv: Tensor) -> Tensor:
    num_tokens, num_heads, rank = call.out.shape
    width = w_uv.shape[2]
    values = torch.empty(num_tokens, num_heads, width, dtype=call.out.dtype, device=call.out.device)
    merge_values_kernel[(num_heads, triton.cdiv(width, COLUMNS), num_tokens)](
        call.out, call.part_out, call.part_lse, call.entries, w_uv, values, num_tokens, num_heads, width,
        call.geometry.team_size * call.geometry.tile_rows, L=rank, COLUMNS=COLUMNS, PIECES=PIECES,
        ITEMS=triton.next_power_of_2(call.geometry.max_items), num_warps=4, **pdl_options(values.device),
    )  # fmt: skip
    return values
