# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""A two-shot all-reduce (reduce-scatter, then all-gather) in Triton-language: each rank sums a part, so less is sent.

Block b belongs to rank b % size: all ranks send it their terms, and it sends all ranks the sum. Each of n ranks sends
2 (n - 1) / n times its elements, where in one shot it sends n - 1 times as many.

Sections are emptied as in `kernel`, and for the same reason: an owner's next sum but one follows from terms that a
rank sends only after its call before has ended, and terms likewise follow from the owner's sum.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.collectives.kernel_receive import EMPTY_HALF, open_buffers, receive


@triton.jit(do_not_specialize=["rank"])
def two_shot_all_reduce_kernel(
    x,  # [num_elements]
    out,  # [num_elements]
    buffers,  # [SIZE] int64: the addresses of all ranks' receive buffers, as this process sees them
    calls,  # [blocks] int32, mod SECTIONS
    rank,
    num_elements,
    part_elements,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SECTIONS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A section of a receive buffer: terms [SIZE, part_elements] of this rank's blocks by rank, sums likewise by
    owner."""
    if PDL:
        gdc_launch_dependents()
    everyone, own = open_buffers(buffers, rank, SIZE, tl.int16)
    if PDL:
        gdc_wait()
    num_blocks = tl.cdiv(num_elements, BLOCK)
    section_elements = (2 * SIZE * part_elements).to(tl.int64)
    sums = SIZE * part_elements
    source = tl.arange(0, SIZE)[:, None] * part_elements
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        offset = block * BLOCK + tl.arange(0, BLOCK)
        inside = offset < num_elements
        part = block // SIZE * BLOCK + tl.arange(0, BLOCK)
        bits = tl.load(x + offset, mask=inside, other=0.0).to(tl.int16, bitcast=True)
        bits = tl.where(bits == EMPTY_HALF, 0, bits)
        call = tl.load(calls + block)
        owner = tl.multiple_of(tl.load(buffers + block % SIZE).to(tl.pointer_type(tl.int16)), 16)
        tl.store(owner + call * section_elements + rank * part_elements + part, bits, mask=inside)
        before = own + (call + SECTIONS - 1) % SECTIONS * section_elements
        tl.store(before + sums + block % SIZE * part_elements + part, tl.full([BLOCK], EMPTY_HALF, tl.int16))
        if block % SIZE == rank:
            tl.store(before + source + part[None, :], tl.full([SIZE, BLOCK], EMPTY_HALF, tl.int16))
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        if block % SIZE == rank:
            offset = block * BLOCK + tl.arange(0, BLOCK)
            there = tl.broadcast_to((offset < num_elements)[None, :], [SIZE, BLOCK])
            part = block // SIZE * BLOCK + tl.arange(0, BLOCK)
            now = tl.load(calls + block) * section_elements
            terms = receive(own + now + source + part[None, :], there, EMPTY_HALF)
            total = tl.sum(terms.to(out.dtype.element_ty, bitcast=True).to(tl.float32), 0)
            bits = total.to(out.dtype.element_ty).to(tl.int16, bitcast=True)
            bits = tl.where(bits == EMPTY_HALF, 0, bits)
            place = now + sums + rank * part_elements + part
            tl.store(everyone + place[None, :], tl.broadcast_to(bits[None, :], [SIZE, BLOCK]), mask=there)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        offset = block * BLOCK + tl.arange(0, BLOCK)
        inside = offset < num_elements
        part = block // SIZE * BLOCK + tl.arange(0, BLOCK)
        call = tl.load(calls + block)
        place = call * section_elements + sums + block % SIZE * part_elements + part
        total = receive(own + place, inside, EMPTY_HALF)
        tl.store(out + offset, total.to(out.dtype.element_ty, bitcast=True), mask=inside)
        tl.store(calls + block, (call + 1) % SECTIONS)
