"""The board: memory that the draft's process and the target's have both mapped, for what a step of one tells the other
while the hosts know nothing of it yet (docs/decisions/0016).

A verify shows what it drew and accepted, a draft step the tokens that it leaves. Each is shown by the stream that
computes it, and the stream of the other process waits for it: the numbers below only grow, and a stream goes on when a
number has been reached. The memory is the host's, so that a process can let its own stream go when the other has died.
"""

import json
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kimi_backend.runners.sealed_memory import MemoryHandle, OwnMemory, SealedMemoryError, open_memory
from kimi_backend.types.plan import PLACEHOLDER_TOKEN_ID
from kimi_kernels.sampling_inputs import STATUS_NOT_FINITE

TARGET_PID, WAITED, VERIFIED, QUEUED, LEFT, PROMISED = range(1, 7)
"""Words of the board, behind the memory's token. TARGET_PID: process that has opened it. WAITED: the last stamp that
the draft waits for; PROMISED: of the last verify that the target was given; VERIFIED: of the last one that is shown.
QUEUED: number of the draft's last step; LEFT: of the last one that is done."""
LAST_STAMP = 2**62
"""More than nanoseconds since 1970, which stamps begin from (`aux_transfer.BoardTransfer`)."""
_LINE_BYTES = 64
_WORDS_PER_LINE = _LINE_BYTES // 8
_NUM_LINES = 8


BoardError = SealedMemoryError


def offset_of(word: int) -> int:
    """Bytes from the board's start. Each word has a cache line of its own."""
    return word * _LINE_BYTES


@dataclass(frozen=True, slots=True)
class _Layout:
    """Bytes, by the shape of what a draft leaves: [W, S], W = 1 + its longest proposal."""

    width: int
    num_seqs: int

    @property
    def drawn(self) -> int:
        return _NUM_LINES * _LINE_BYTES

    @property
    def num_drawn_bytes(self) -> int:
        return (8 * self.width + 4) * self.num_seqs

    @property
    def left(self) -> int:
        return self.drawn + -(-self.num_drawn_bytes // _LINE_BYTES) * _LINE_BYTES

    @property
    def num_bytes(self) -> int:
        needed = self.left + 4 * self.width * self.num_seqs
        return -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a verify drew: views of one array of bytes, on the board or on a device."""

    whole: torch.Tensor
    """uint8"""
    token_ids: torch.Tensor
    """[S, W] int64"""
    num_accepted: torch.Tensor
    """[S] int32"""

    @classmethod
    def of(cls, whole: torch.Tensor, width: int) -> "Drawn":
        num_seqs = len(whole) // (8 * width + 4)
        num_bytes = 8 * width * num_seqs
        token_ids = whole[:num_bytes].view(torch.int64).view(num_seqs, width)
        return cls(whole, token_ids, whole[num_bytes:].view(torch.int32))

    def like(self, device: torch.device) -> "Drawn":
        """Zeros of the same shapes."""
        return Drawn.of(torch.zeros_like(self.whole, device=device), self.token_ids.shape[1])


class StepBoard:
    """One mapping of it. It goes when no process has it any more."""

    def __init__(self, memory: mmap.mmap, shape: tuple[int, int]) -> None:
        """shape: [W, S] of the array that the draft leaves (`types.plan.TokenHandle`)."""
        layout = _Layout(*shape)
        self.shape = shape
        self.num_bytes = layout.num_bytes
        words = np.frombuffer(memory, np.int64, _NUM_LINES * _WORDS_PER_LINE)
        self._words = words[::_WORDS_PER_LINE]
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.drawn = Drawn.of(self._whole[layout.drawn :][: layout.num_drawn_bytes], shape[0])
        self.left = self._whole[layout.left :][: 4 * shape[0] * shape[1]].view(torch.int32).view(shape)
        """[W, S] int32"""

    @property
    def address(self) -> int:
        """In this process."""
        return self._whole.data_ptr()

    def word(self, index: int) -> int:
        """As it is now."""
        return int(self._words[index])

    def set_word(self, index: int, value: int) -> None:
        """At once, by this CPU."""
        self._words[index] = value

    def show_nothing_drawn(self, stamp: int) -> None:
        """In place of a verify that will show nothing: as if it had accepted nothing."""
        self.drawn.whole.zero_()
        self.set_word(VERIFIED, stamp)

    def show_nothing_left(self, number: int) -> None:
        """In place of a draft step that will leave nothing: as if all of it had failed."""
        leave_nothing(self.left)
        self.set_word(LEFT, number)


def leave_nothing(left: torch.Tensor) -> None:
    """Make an array of tokens [W, S] say that every sequence failed."""
    left.fill_(PLACEHOLDER_TOKEN_ID)
    left[0] = STATUS_NOT_FINITE


class OwnBoard:
    """The draft's end makes it."""

    def __init__(self, shape: tuple[int, int]) -> None:
        """Raises BoardError: no memory to share."""
        self._own = OwnMemory(_Layout(*shape).num_bytes)
        self.board = StepBoard(self._own.memory, shape)
        leave_nothing(self.board.left)

    @property
    def memory_handle(self) -> bytes:
        """Of the memory alone (`runners.ranks.board_words`)."""
        return self._own.handle.to_bytes()

    @property
    def handle(self) -> bytes:
        """By which the target opens it."""
        return json.dumps({"memory": self.memory_handle.decode(), "shape": self.board.shape}).encode()

    def close(self) -> None:
        """Nobody can open it any more."""
        self._own.close()


@dataclass(frozen=True, slots=True)
class OpenedBoard:
    """The target's end."""

    board: StepBoard
    owner_pid: int
    memory_handle: bytes
    """As in `OwnBoard`."""

    @classmethod
    def open(cls, handle: bytes) -> "OpenedBoard":
        """Raises BoardError: it is not there any more, or the handle is none."""
        try:
            fields: dict[str, Any] = json.loads(handle)
            memory_handle, (width, num_seqs) = fields["memory"].encode(), fields["shape"]
            shape = int(width), int(num_seqs)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
            raise BoardError("its handle cannot be read") from None
        memory = MemoryHandle.from_bytes(memory_handle)
        if min(shape) < 1 or _Layout(*shape).num_bytes != memory.num_bytes:
            raise BoardError("its handle gives a size that is not of its shape")
        return cls(StepBoard(open_memory(memory), shape), memory.process_id, memory_handle)
