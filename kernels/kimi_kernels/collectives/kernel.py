"""Collectives over the GPUs of one host for the few rows of a decode step, in Triton-language: a one-shot all-reduce
and an all-gather.

Every rank writes its elements into every rank's receive buffer and reads its own, so the time is that of one write over
NVLink. Nothing announces the data: a receive buffer is full of a pattern of bits that no rank sends, and a reader waits
until none is left. The ranks' terms of a sum are added in float32 by the same code in the same order, so every rank
gets the same bits. The reference is NCCL's result, or a float32 sum: tests compare with both.

A receive buffer has three sections that calls take in turn. Call e empties the section of call e - 1, which call e + 2
fills: a rank begins call e + 2 when every rank has sent its elements of call e + 1, which it does after call e has
ended. So nobody waits for a section either. All of this holds block by block: a block's part of the receive buffer is
its own, whatever the number of elements, and `calls` counts its calls.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.collectives.kernel_receive import EMPTY_HALF, EMPTY_WORD, SENT_WORD, open_buffers, receive_all, send
from kimi_kernels.collectives.kernel_two_shot import two_shot_all_reduce_kernel
from kimi_kernels.collectives.receive_buffers import MOST_PROGRAMS, ReceiveBuffers

HALF_DTYPES = (torch.bfloat16, torch.float16)
WORD_BYTES = 4


@triton.jit(do_not_specialize=["rank"])
def one_shot_all_reduce_kernel(
    x,  # [num_elements]
    out,  # [num_elements]
    buffers,  # [SIZE] int64: the addresses of all ranks' receive buffers, as this process sees them
    calls,  # [blocks] int32, mod SECTIONS
    rank,
    num_elements,
    slot_elements,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SECTIONS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    everyone, own = open_buffers(buffers, rank, SIZE, tl.int16)
    if PDL:
        gdc_wait()
    num_blocks = tl.cdiv(num_elements, BLOCK)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        offset = block * BLOCK + tl.arange(0, BLOCK)
        inside = offset < num_elements
        bits = tl.load(x + offset, mask=inside, other=0.0).to(tl.int16, bitcast=True)
        bits = tl.where(bits == EMPTY_HALF, 0, bits)
        call = tl.load(calls + block)
        send(bits, offset, inside, everyone, own, rank, call, slot_elements, EMPTY_HALF, SIZE, BLOCK, SECTIONS)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        offset = block * BLOCK + tl.arange(0, BLOCK)
        inside = offset < num_elements
        call = tl.load(calls + block)
        found = receive_all(own, offset, inside, call, slot_elements, EMPTY_HALF, SIZE, BLOCK)
        total = tl.sum(found.to(out.dtype.element_ty, bitcast=True).to(tl.float32), 0)
        tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)
        tl.store(calls + block, (call + 1) % SECTIONS)


@triton.jit(do_not_specialize=["rank"])
def all_gather_kernel(
    x,  # [rows, row_words] int32
    out,  # [rows, SIZE, row_words] int32
    buffers,  # [SIZE] int64
    calls,  # [blocks] int32, mod SECTIONS
    rank,
    num_words,
    row_words,
    slot_words,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SECTIONS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    everyone, own = open_buffers(buffers, rank, SIZE, tl.int32)
    if PDL:
        gdc_wait()
    num_blocks = tl.cdiv(num_words, BLOCK)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        offset = block * BLOCK + tl.arange(0, BLOCK)
        inside = offset < num_words
        bits = tl.load(x + offset, mask=inside, other=0)
        bits = tl.where(bits == EMPTY_WORD, SENT_WORD, bits)
        call = tl.load(calls + block)
        send(bits, offset, inside, everyone, own, rank, call, slot_words, EMPTY_WORD, SIZE, BLOCK, SECTIONS)
    part = tl.arange(0, SIZE)[:, None] * row_words
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        offset = block * BLOCK + tl.arange(0, BLOCK)
        inside = offset < num_words
        call = tl.load(calls + block)
        found = receive_all(own, offset, inside, call, slot_words, EMPTY_WORD, SIZE, BLOCK)
        row, column = offset // row_words, offset % row_words
        place = (row.to(tl.int64) * (SIZE * row_words) + column)[None, :] + part
        tl.store(out + place, found, mask=tl.broadcast_to(inside[None, :], [SIZE, BLOCK]))
        tl.store(calls + block, (call + 1) % SECTIONS)


class _Calls:
    """Calls of one kind on one device, over receive buffers of their own."""

    def __init__(self, buffers: ReceiveBuffers, most_programs: int | None = None) -> None:
        self._buffers = buffers
        self.most_programs = most_programs or MOST_PROGRAMS[buffers.size]

    def _grid(self, num_elements: int) -> tuple[int]:
        return (min(triton.cdiv(num_elements, self._buffers.block), self.most_programs),)


class AllReduce(_Calls):
    """An all-reduce, in one shot or in two, over receive buffers of int16."""

    def takes(self, x: Tensor) -> bool:
        return x.dtype in HALF_DTYPES and 0 < x.numel() <= self._buffers.most_elements

    def __call__(self, x: Tensor) -> Tensor:
        x, own = x.contiguous(), self._buffers
        out = torch.empty_like(x)
        kernel = two_shot_all_reduce_kernel if own.two_shot else one_shot_all_reduce_kernel
        kernel[self._grid(x.numel())](
            x, out, own.addresses, own.calls, own.rank, x.numel(), own.slot_elements, **own.options
        )
        return out


class AllGather(_Calls):
    """An all-gather of columns, over receive buffers of int32."""

    def takes(self, x: Tensor) -> bool:
        is_float = x.dtype in (*HALF_DTYPES, torch.float32)
        is_whole = x.ndim == 2 and x.shape[1] * x.itemsize % WORD_BYTES == 0
        return is_float and is_whole and 0 < x.nbytes // WORD_BYTES <= self._buffers.most_elements

    def __call__(self, x: Tensor) -> Tensor:
        words, own = x.contiguous().view(torch.int32), self._buffers
        rows, row_words = words.shape
        out = torch.empty(rows, own.size * row_words, dtype=torch.int32, device=x.device)
        all_gather_kernel[self._grid(words.numel())](
            words, out, own.addresses, own.calls, own.rank, words.numel(), row_words, own.slot_elements, **own.options
        )
        return out.view(x.dtype)
