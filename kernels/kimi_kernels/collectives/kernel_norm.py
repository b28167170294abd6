# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""All-reduce, residual addition and norm in one launch of Triton-language.

A program takes a fourth of a row's columns: it hands them on as `kernel` and `kernel_two_shot` do, with receive buffers
of its own, adds them, and tells the other programs of its row the sum of their squares, through memory of this GPU that
is emptied and filled as a receive buffer is. So all programs of a call have to run at once. The sum has the bits of
those kernels; a row's squares are added in another order than `rms_norm` adds them, the same on every rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.collectives.kernel import HALF_DTYPES
from kimi_kernels.collectives.kernel_receive import (
    EMPTY_HALF,
    EMPTY_WORD,
    SENT_WORD,
    open_buffers,
    receive,
    receive_all,
    send,
)
from kimi_kernels.collectives.op import check_all_reduce_norm
from kimi_kernels.collectives.receive_buffers import BLOCK_BYTES, MOST_PROGRAMS, NUM_SECTIONS, ReceiveBuffers
from kimi_kernels.moe_experts.kernel_sum import assignment_arguments, sum_of_assignments
from kimi_kernels.moe_experts.op import Terms

BLOCK = BLOCK_BYTES // 2
ROW_BLOCKS = 4
"""Programs of a row, whatever its width: they count their calls together."""
MOST_COLUMNS = ROW_BLOCKS * BLOCK
"""Widest rows."""


@triton.jit
def _two_shot_sum(
    bits, inside, buffers, everyone, own, rank, call, slot_elements, DTYPE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, SECTIONS: tl.constexpr,
):  # fmt: skip
    """Sum of this program's block, [BLOCK] of DTYPE: its owner, rank program % SIZE, adds the terms and tells all.

    A section of a receive buffer: terms [SIZE, slot_elements] of the own blocks by rank, sums likewise by owner.
    """
    owner = tl.program_id(0) % SIZE
    part = tl.program_id(0) // SIZE * BLOCK + tl.arange(0, BLOCK)
    source = tl.arange(0, SIZE)[:, None] * slot_elements
    there = tl.broadcast_to(inside[None, :], [SIZE, BLOCK])
    section_elements = (2 * SIZE * slot_elements).to(tl.int64)
    now = call * section_elements
    before = own + (call + SECTIONS - 1) % SECTIONS * section_elements
    sums = SIZE * slot_elements + owner * slot_elements + part
    to_owner = tl.multiple_of(tl.load(buffers + owner).to(tl.pointer_type(tl.int16)), 16)
    tl.store(to_owner + now + rank * slot_elements + part, bits, mask=inside)
    tl.store(before + sums, tl.full([BLOCK], EMPTY_HALF, tl.int16))
    if owner == rank:
        tl.store(before + source + part[None, :], tl.full([SIZE, BLOCK], EMPTY_HALF, tl.int16))
        terms = receive(own + now + source + part[None, :], there, EMPTY_HALF)
        total = tl.sum(terms.to(DTYPE, bitcast=True).to(tl.float32), 0).to(DTYPE).to(tl.int16, bitcast=True)
        total = tl.where(total == EMPTY_HALF, 0, total)
        tl.store(everyone + (now + sums)[None, :], tl.broadcast_to(total[None, :], [SIZE, BLOCK]), mask=there)
    return receive(own + now + sums, inside, EMPTY_HALF).to(DTYPE, bitcast=True)


@triton.jit(do_not_specialize=["rank"])
def all_reduce_norm_kernel(
    x,  # [T, width], contiguous; products of assignments where TOP_K is not 0
    topk_ids,  # as the next ones: of `sum_of_assignments`
    topk_weights,
    first_expert,
    num_experts,
    second,  # [T, width], contiguous, or unused
    residual,  # [T, width], columns contiguous
    weight,  # [width]
    out,  # [T, width]
    total,  # [T, width]
    buffers,  # [SIZE] int64: the addresses of all ranks' receive buffers, as this process sees them
    calls,  # [programs] int32, mod SECTIONS
    squares,  # [SECTIONS, most programs] int32
    rank,
    residual_stride,
    width,
    columns,  # of a program, at most BLOCK
    slot_elements,
    most_programs,
    eps,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,  # of a row
    BLOCK: tl.constexpr,
    SECTIONS: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = x.dtype.element_ty
    everyone, own = open_buffers(buffers, rank, SIZE, tl.int16)
    program = tl.program_id(0)
    row = (program // PROGRAMS).to(tl.int64)
    place = tl.arange(0, BLOCK)
    column = program % PROGRAMS * columns + place
    inside = (place < columns) & (column < width)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    call = tl.load(calls + program)
    if TOP_K:
        term = sum_of_assignments(
            x, topk_ids, topk_weights, row, column, inside, width, first_expert, num_experts, TOP_K
        ).to(dtype)
    else:
        term = tl.load(x + row * width + column, mask=inside, other=0.0)
    if HAS_SECOND:
        more = tl.load(second + row * width + column, mask=inside, other=0.0)
        term = (term.to(tl.float32) + more.to(tl.float32)).to(dtype)
    stream = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    bits = term.to(tl.int16, bitcast=True)
    bits = tl.where(bits == EMPTY_HALF, 0, bits)
    if TWO_SHOT:
        added = _two_shot_sum(
            bits, inside, buffers, everyone, own, rank, call, slot_elements, dtype, SIZE, BLOCK, SECTIONS
        )
    else:
        offset = program * BLOCK + tl.arange(0, BLOCK)
        send(bits, offset, inside, everyone, own, rank, call, slot_elements, EMPTY_HALF, SIZE, BLOCK, SECTIONS)
        found = receive_all(own, offset, inside, call, slot_elements, EMPTY_HALF, SIZE, BLOCK)
        added = tl.sum(found.to(dtype, bitcast=True).to(tl.float32), 0).to(dtype)
    rounded = (stream + added.to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + row * width + column, rounded, mask=inside)
    values = tl.where(inside, rounded.to(tl.float32), 0.0)
    square = tl.sum(values * values, 0).to(tl.int32, bitcast=True)
    tl.store(squares + call * most_programs + program, tl.where(square == EMPTY_WORD, SENT_WORD, square))
    tl.store(squares + (call + SECTIONS - 1) % SECTIONS * most_programs + program, EMPTY_WORD)
    of_row = program // PROGRAMS * PROGRAMS + tl.arange(0, PROGRAMS)
    parts = receive(squares + call * most_programs + of_row, of_row >= 0, EMPTY_WORD)
    mean = tl.sum(parts.to(tl.float32, bitcast=True), 0) / width
    normed = values * tl.rsqrt(mean + eps) * scale
    tl.store(out + row * width + column, normed.to(out.dtype.element_ty), mask=inside)
    tl.store(calls + program, (call + 1) % SECTIONS)


class FusedAllReduceNorm:
    """`AllReduceNorm` on one device, in one shot or in two, over receive buffers of int16."""

    def __init__(self, buffers: ReceiveBuffers) -> None:
        self._buffers = buffers
        self._most_blocks = min(buffers.num_blocks, MOST_PROGRAMS[buffers.size])
        shape = (NUM_SECTIONS, self._most_blocks)
        self._squares = torch.full(shape, EMPTY_WORD.value, dtype=torch.int32, device=buffers.calls.device)

    def takes(self, x: Terms) -> bool:
        fits = len(x.shape) == 2 and 0 < x.shape[0] * ROW_BLOCKS <= self._most_blocks
        return fits and 0 < x.shape[1] <= MOST_COLUMNS and x.dtype in HALF_DTYPES

    def __call__(
        self, x: Terms, residual: Tensor, weight: Tensor, eps: float, second: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        check_all_reduce_norm(x, residual, weight, second)
        terms, topk_ids, topk_weights, first_expert, num_experts, top_k = assignment_arguments(x)
        terms, own = terms.contiguous(), self._buffers
        out = torch.empty(x.shape, dtype=x.dtype, device=terms.device)
        total = torch.empty(x.shape, dtype=residual.dtype, device=terms.device)
        all_reduce_norm_kernel[(x.shape[0] * ROW_BLOCKS,)](
            terms, topk_ids, topk_weights, first_expert, num_experts,
            terms if second is None else second.contiguous(), residual, weight.contiguous(), out, total,
            own.addresses, own.calls, self._squares, own.rank, residual.stride(0), x.shape[1],
            columns_of_a_program(x.shape[1]), own.slot_elements, self._most_blocks, eps,
            TOP_K=top_k, HAS_SECOND=second is not None, TWO_SHOT=own.two_shot, PROGRAMS=ROW_BLOCKS, **own.options,
        )  # fmt: skip
        return out, total


def columns_of_a_program(width: int) -> int:
    """Return a fourth of a row, in whole 16-byte accesses: as much work for each, the same access for all threads."""
    return -(-width // (16 * ROW_BLOCKS)) * 16
