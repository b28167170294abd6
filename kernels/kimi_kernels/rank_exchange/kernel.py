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

from kimi_kernels.argument_checks import require
from kimi_kernels.dependent_launch import has_dependent_launch
from kimi_kernels.rank_exchange.kernel_receive import NUM_SECTIONS, open_buffers, receive_all, send

BLOCK_BYTES = 4096
"""Exchanged at a time."""
MOST_PROGRAMS = {2: 512, 4: 256, 8: 256}
"""The most programs of a call, by the number of ranks. They wait for other ranks', so all should run at once: an H100
holds four on each multiprocessor of 64 registers a thread, two of 128. With more programs more is on its way."""
EMPTY_HALF = tl.constexpr(-32768)
"""Negative zero in bfloat16 and float16, as int16: zero is sent in its place."""
EMPTY_WORD = tl.constexpr(-1)
"""A NaN in float32, and two in 16-bit types, as int32: ..."""
SENT_WORD = tl.constexpr(0x7FC07FC0)
"""... other NaNs are sent in its place."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
WORD_BYTES = 4


@triton.jit(do_not_specialize=["rank"])
def rank_sum_kernel(
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
def rank_gather_kernel(
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


class ReceiveBuffers:
    """The receive buffers of one kind of call: this rank's own, and where the others' are."""

    def __init__(
        self, rank: int, addresses: list[int], dtype: torch.dtype, most_elements: int, device: torch.device
    ) -> None:
        """
        Args:
            addresses: of all ranks' receive buffers in rank order, mapped here, of `new_receive_buffer`; all are empty
                before any rank's first call.
            dtype: int16 or int32.
            most_elements: of one call; the receive buffers were made for it.
        Raises:
            ValueError: the number of ranks is none of 2, 4 and 8.
        """
        size = len(addresses)
        self.block = BLOCK_BYTES // dtype.itemsize
        require(size in MOST_PROGRAMS, "receive buffers", f"{size} of them", "2, 4 or 8")
        self.rank = rank
        self.size = size
        self.most_elements = most_elements
        self.slot_elements = _slot_elements(dtype, most_elements)
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.calls = torch.zeros(self.slot_elements // self.block, dtype=torch.int32, device=device)
        early = has_dependent_launch(device)
        self.options = {
            "SIZE": size, "BLOCK": self.block, "SECTIONS": NUM_SECTIONS, "PDL": early, "num_warps": 8,
            **({"launch_pdl": True} if early else {}),
        }  # fmt: skip


class RankSum:
    """Sums over ranks on one device. One call at a time, in the order in which every rank makes them."""

    def __init__(self, buffers: ReceiveBuffers, most_programs: int | None = None) -> None:
        """buffers: of int16."""
        self._buffers = buffers
        self.most_programs = most_programs or MOST_PROGRAMS[buffers.size]

    def takes(self, x: Tensor) -> bool:
        """Tell whether x can be summed here; the same on every rank, as its dtype and shape are."""
        return x.dtype in HALF_DTYPES and 0 < x.numel() <= self._buffers.most_elements

    def __call__(self, x: Tensor) -> Tensor:
        """x: of any shape, that `takes` accepts -> the sum over ranks, of x's dtype and shape, the same on all."""
        x, own = x.contiguous(), self._buffers
        out = torch.empty_like(x)
        rank_sum_kernel[(min(triton.cdiv(x.numel(), own.block), self.most_programs),)](
            x, out, own.addresses, own.calls, own.rank, x.numel(), own.slot_elements, **own.options
        )
        return out


class RankGather:
    """Gathers columns over ranks on one device. One call at a time, in the order in which every rank makes them."""

    def __init__(self, buffers: ReceiveBuffers, most_programs: int | None = None) -> None:
        """buffers: of int32."""
        self._buffers = buffers
        self.most_programs = most_programs or MOST_PROGRAMS[buffers.size]

    def takes(self, x: Tensor) -> bool:
        """Tell whether the columns can be gathered here; the same on every rank, as x's dtype and shape are."""
        is_float = x.dtype in (*HALF_DTYPES, torch.float32)
        is_whole = x.ndim == 2 and x.shape[1] * x.itemsize % WORD_BYTES == 0
        return is_float and is_whole and 0 < x.nbytes // WORD_BYTES <= self._buffers.most_elements

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, columns] that `takes` accepts -> [rows, size * columns] in rank order; bits as they were, but that
        a NaN may be another one."""
        words, own = x.contiguous().view(torch.int32), self._buffers
        rows, row_words = words.shape
        out = torch.empty(rows, own.size * row_words, dtype=torch.int32, device=x.device)
        rank_gather_kernel[(min(triton.cdiv(words.numel(), own.block), self.most_programs),)](
            words, out, own.addresses, own.calls, own.rank, words.numel(), row_words, own.slot_elements, **own.options
        )
        return out.view(x.dtype)


def new_receive_buffer(dtype: torch.dtype, size: int, most_elements: int, device: torch.device) -> Tensor:
    """[NUM_SECTIONS * size * slot] of int16 or int32, empty."""
    empty = EMPTY_HALF.value if dtype == torch.int16 else EMPTY_WORD.value
    return torch.full((NUM_SECTIONS * size * _slot_elements(dtype, most_elements),), empty, dtype=dtype, device=device)


def _slot_elements(dtype: torch.dtype, most_elements: int) -> int:
    block = BLOCK_BYTES // dtype.itemsize
    return -(-most_elements // block) * block
