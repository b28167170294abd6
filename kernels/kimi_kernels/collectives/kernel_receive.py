# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Device functions that hand a block of one rank's elements to every rank, in Triton-language. See `kernel.py`."""

import triton
import triton.language as tl

from kimi_kernels.collectives import receive_buffers

EMPTY_HALF = tl.constexpr(receive_buffers.EMPTY_HALF)
EMPTY_WORD = tl.constexpr(receive_buffers.EMPTY_WORD)
SENT_WORD = tl.constexpr(0x7FC07FC0)
"""NaNs that are sent in place of EMPTY_WORD's."""


@triton.jit
def open_buffers(buffers, rank, SIZE: tl.constexpr, ELEMENT: tl.constexpr):
    """Pointers to every rank's receive buffer, [SIZE, 1], and to this rank's own. The hints make accesses 16 bytes
    wide."""
    everyone = tl.load(buffers + tl.arange(0, SIZE)).to(tl.pointer_type(ELEMENT))
    own = tl.load(buffers + rank).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(everyone[:, None], [16, 16]), tl.multiple_of(own, 16)


@triton.jit
def send(
    bits, offset, inside, everyone, own, rank, call, slot_elements, EMPTY: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, SECTIONS: tl.constexpr,
):  # fmt: skip
    """Write a block, bits [BLOCK] none of which is EMPTY, to every rank, and empty what the call before filled."""
    there = tl.broadcast_to(inside[None, :], [SIZE, BLOCK])
    slot = (call * SIZE + rank).to(tl.int64) * slot_elements + offset
    tl.store(everyone + slot[None, :], tl.broadcast_to(bits[None, :], [SIZE, BLOCK]), mask=there)
    before = (call + SECTIONS - 1) % SECTIONS * SIZE + tl.arange(0, SIZE)
    slots = before[:, None].to(tl.int64) * slot_elements + offset[None, :]
    tl.store(own + slots, tl.full([SIZE, BLOCK], EMPTY, bits.dtype))


@triton.jit
def receive(slots, there, EMPTY: tl.constexpr):
    """Load a receive buffer at `slots`, once all of it has come; 0 where nothing will."""
    found = tl.load(slots, mask=there, other=0, volatile=True)
    while tl.max((found == EMPTY).to(tl.int32)) > 0:
        found = tl.load(slots, mask=there, other=0, volatile=True)
    return found


@triton.jit
def receive_all(own, offset, inside, call, slot_elements, EMPTY: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Every rank's block, [SIZE, BLOCK], that `send` sent."""
    now = call * SIZE + tl.arange(0, SIZE)
    slots = own + (now[:, None].to(tl.int64) * slot_elements + offset[None, :])
    return receive(slots, tl.broadcast_to(inside[None, :], [SIZE, BLOCK]), EMPTY)
