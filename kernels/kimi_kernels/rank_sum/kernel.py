"""A sum over the GPUs of one host, for the few rows of a decode step, in Triton-language.

Every rank writes its rows into every rank's inbox and sums what lies in its own, so the time is that of one write over
NVLink. Nothing announces the data: an inbox is full of a number that no rank sends (negative zero: a rank sends zero in
its place), and a reader waits until none is left. The ranks' terms are added in float32 by the same code in the same
order, so every rank gets the same bits.

An inbox has three buffers that calls take in turn. Call e empties the buffer of call e - 1, which call e + 2 fills: a
rank begins call e + 2 when every rank has sent its rows of call e + 1, which it does after call e has ended. So nobody
waits for a buffer either.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.argument_checks import require
from kimi_kernels.early_start import starts_early

NUM_BUFFERS = 3
BLOCK = 2048
"""Elements summed at a time. The same for every call: a block's part of the inbox is its own whatever the rows' number.
"""
MOST_PROGRAMS = 128
"""Programs wait for other ranks' programs, so those of two sums at once, target and draft, must all find room."""
EMPTY = tl.constexpr(-32768)
"""The bits of negative zero in bfloat16 and float16, as int16."""
DTYPES = (torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["rank"])
def rank_sum_kernel(
    x,  # [num_elements]
    out,  # [num_elements]
    inboxes,  # [SIZE] int64: the addresses of all ranks' inboxes, as this process sees them
    calls,  # [blocks] int32: sums of each block so far, mod NUM_BUFFERS
    rank,
    num_elements,
    slot_elements,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BUFFERS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    # The hints make accesses 16 bytes wide.
    everyone = tl.load(inboxes + tl.arange(0, SIZE)).to(tl.pointer_type(tl.int16))
    everyone = tl.multiple_of(everyone[:, None], [16, 16])
    own = tl.multiple_of(tl.load(inboxes + rank).to(tl.pointer_type(tl.int16)), 16)
    if PDL:
        gdc_wait()
    num_blocks = tl.cdiv(num_elements, BLOCK)
    source = tl.arange(0, SIZE)[:, None].to(tl.int64) * slot_elements
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        offset = block * BLOCK + tl.arange(0, BLOCK)
        inside = offset < num_elements
        call = tl.load(calls + block)
        bits = tl.load(x + offset, mask=inside, other=0.0).to(tl.int16, bitcast=True)
        bits = tl.where(bits == EMPTY, 0, bits)
        slot = (call * SIZE + rank).to(tl.int64) * slot_elements + offset
        there = tl.broadcast_to(inside[None, :], [SIZE, BLOCK])
        tl.store(everyone + slot[None, :], tl.broadcast_to(bits[None, :], [SIZE, BLOCK]), mask=there)
        before = ((call + NUM_BUFFERS - 1) % NUM_BUFFERS).to(tl.int64) * SIZE * slot_elements
        tl.store(own + before + source + offset[None, :], tl.full([SIZE, BLOCK], EMPTY, tl.int16))
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        offset = block * BLOCK + tl.arange(0, BLOCK)
        inside = offset < num_elements
        call = tl.load(calls + block)
        now = own + call.to(tl.int64) * SIZE * slot_elements + source + offset[None, :]
        there = tl.broadcast_to(inside[None, :], [SIZE, BLOCK])
        found = tl.load(now, mask=there, other=0, volatile=True)
        while tl.max(tl.max((found == EMPTY).to(tl.int32), 1), 0) > 0:
            found = tl.load(now, mask=there, other=0, volatile=True)
        total = tl.sum(found.to(out.dtype.element_ty, bitcast=True).to(tl.float32), 0)
        tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)
        tl.store(calls + block, (call + 1) % NUM_BUFFERS)


def inbox_elements(size: int, most_elements: int) -> int:
    """16-bit elements of a rank's inbox for sums of up to `most_elements` over `size` ranks."""
    return NUM_BUFFERS * size * _slot_elements(most_elements)


def new_inbox(size: int, most_elements: int, device: torch.device) -> Tensor:
    """[inbox_elements] int16, empty."""
    return torch.full((inbox_elements(size, most_elements),), EMPTY.value, dtype=torch.int16, device=device)


class RankSum:
    """Sums over ranks on one device. One call at a time, in the order in which every rank makes them."""

    def __init__(
        self,
        rank: int,
        inboxes: list[int],
        most_elements: int,
        device: torch.device,
        most_programs: int = MOST_PROGRAMS,
    ) -> None:
        """
        Args:
            inboxes: addresses of all ranks' inboxes in rank order, mapped here, of `new_inbox`; all are empty before
                any rank's first call.
            most_elements: of one sum; the inboxes were made for it.
        Raises:
            ValueError: the number of ranks is no power of two.
        """
        size = len(inboxes)
        require(size & (size - 1) == 0, "inboxes", f"{size} of them", "a power of two")
        self._rank = rank
        self._most_elements = most_elements
        self._slot_elements = _slot_elements(most_elements)
        self._size = size
        self._inboxes = torch.tensor(inboxes, dtype=torch.int64, device=device)
        self._most_programs = most_programs
        self._calls = torch.zeros(self._slot_elements // BLOCK, dtype=torch.int32, device=device)
        self._early = starts_early(device)

    def takes(self, x: Tensor) -> bool:
        """Whether x can be summed here; the same on every rank, as its dtype and shape are."""
        return x.dtype in DTYPES and 0 < x.numel() <= self._most_elements

    def __call__(self, x: Tensor) -> Tensor:
        """x: of any shape, that `takes` accepts -> the sum over ranks, of x's dtype and shape, the same on all."""
        x = x.contiguous()
        out = torch.empty_like(x)
        rank_sum_kernel[(min(triton.cdiv(x.numel(), BLOCK), self._most_programs),)](
            x, out, self._inboxes, self._calls, self._rank, x.numel(), self._slot_elements,
            SIZE=self._size, BLOCK=BLOCK, NUM_BUFFERS=NUM_BUFFERS, PDL=self._early, num_warps=8,
            **({"launch_pdl": True} if self._early else {}),
        )  # fmt: skip
        return out


def _slot_elements(most_elements: int) -> int:
    return -(-most_elements // BLOCK) * BLOCK
