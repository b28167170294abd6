"""The memory by which ranks hand one another the elements of one kind of call."""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require
from kimi_kernels.dependent_launch import pdl_options

BLOCK_BYTES = 4096
"""Handed on at a time."""
NUM_SECTIONS = 3
MOST_PROGRAMS = {2: 512, 4: 256, 8: 256}
"""The most programs of a call, by the number of ranks. They wait for other ranks', so all should run at once: an H100
holds four on each multiprocessor of 64 registers a thread, two of 128. With more programs more is on its way."""
EMPTY_HALF = -32768
"""Negative zero in bfloat16 and float16, as int16: zero is sent in its place."""
EMPTY_WORD = -1
"""A NaN in float32, and two in 16-bit types, as int32: another NaN is sent in its place."""


class ReceiveBuffers:
    """This rank's own receive buffer, and where the others' are."""

    def __init__(
        self,
        rank: int,
        addresses: list[int],
        dtype: torch.dtype,
        num_blocks: int,
        device: torch.device,
        *,
        two_shot: bool = False,
    ) -> None:
        """
        Args:
            addresses: of all ranks' receive buffers in rank order, mapped here, of `new_receive_buffer` with the same
                dtype, num_blocks and two_shot; all are empty before any rank's first call.
        Raises:
            ValueError: the number of ranks is none of 2, 4 and 8.
        """
        size = len(addresses)
        require(size in MOST_PROGRAMS, "receive buffers", f"{size} of them", "2, 4 or 8")
        self.rank, self.size, self.num_blocks, self.two_shot = rank, size, num_blocks, two_shot
        self.block = BLOCK_BYTES // dtype.itemsize
        self.most_elements = num_blocks * self.block
        """The most elements of one call."""
        self.slot_elements = _slot_elements(size, dtype, num_blocks, two_shot)
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.calls = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        self.options = {"SIZE": size, "BLOCK": self.block, "SECTIONS": NUM_SECTIONS, "num_warps": 8} | pdl_options(
            device
        )


def new_receive_buffer(
    dtype: torch.dtype, size: int, num_blocks: int, device: torch.device, *, two_shot: bool = False
) -> Tensor:
    """Return a receive buffer for calls of up to `num_blocks` blocks on `size` ranks, empty.

    dtype: int16 or int32. [NUM_SECTIONS * size * slot]; of two shots twice as much, for terms and sums.
    """
    empty = EMPTY_HALF if dtype == torch.int16 else EMPTY_WORD
    num_slots = NUM_SECTIONS * size * (2 if two_shot else 1)
    return torch.full(
        (num_slots * _slot_elements(size, dtype, num_blocks, two_shot),), empty, dtype=dtype, device=device
    )


def blocks_of(num_bytes: int) -> int:
    """Count the blocks of so many bytes."""
    return -(-num_bytes // BLOCK_BYTES)


def _slot_elements(size: int, dtype: torch.dtype, num_blocks: int, two_shot: bool) -> int:
    """Elements from one rank to another in a call: all, or of two shots those that one of them sums."""
    return (-(-num_blocks // size) if two_shot else num_blocks) * (BLOCK_BYTES // dtype.itemsize)
