"""The board, shared semaphores beside the token table: memory of the host that the draft's process and the target's
have both mapped, for what a step of one tells the other while the hosts know nothing of it yet (docs/decisions/0016).

It has words, which only grow and are step ids, and both halves of the token table. Each process writes its own words
and its own half, by the stream that computes them, and the stream of the other process waits for a word. The memory is
the host's, so that a process can let its own stream go when the other has died.
"""

import json
import mmap
from dataclasses import dataclass

import numpy as np
import torch

from kimi_backend.runners.hand_over.token_table import clear_proposals
from kimi_backend.runners.sealed_memory import MemoryHandle, OwnMemory, SealedMemoryError, open_memory

TARGET_PID, WAITED, PROMISED, VERIFIED, QUEUED, LEFT = range(1, 7)
"""Words, behind the memory's token. TARGET_PID: process that has opened it. WAITED: the last verify that the draft
waits for; PROMISED: the last that the target was given; VERIFIED: the last that is done. QUEUED: the last draft step
that the draft was given; LEFT: the last that is done."""
_LINE_BYTES = 64
_WORDS_PER_LINE = _LINE_BYTES // 8
_NUM_LINES = 8


class BoardError(SealedMemoryError):
    """There is no such memory, or not any more."""


def offset_of(word: int) -> int:
    """Bytes from the board's start. Each word has a cache line of its own."""
    return word * _LINE_BYTES


def _num_bytes(shape: tuple[int, int]) -> int:
    needed = _NUM_LINES * _LINE_BYTES + 2 * 4 * shape[0] * shape[1]
    return -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE


class Board:
    """One mapping of it. It goes when no process has it any more."""

    def __init__(self, memory: mmap.mmap, shape: tuple[int, int]) -> None:
        """shape: [rows, columns] of both halves of the token table."""
        self.shape, self.num_bytes = shape, _num_bytes(shape)
        self._words = np.frombuffer(memory, np.int64, _NUM_LINES * _WORDS_PER_LINE)[::_WORDS_PER_LINE]
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)
        halves = self._whole[_NUM_LINES * _LINE_BYTES :][: 8 * shape[0] * shape[1]].view(torch.int32)
        self.drawn, self.proposed = halves.view(2, *shape)
        """[rows, columns] int32: the target's half of the token table, and the draft's."""

    @property
    def address(self) -> int:
        """In this process."""
        return self._whole.data_ptr()

    def word(self, index: int) -> int:
        """Read it as it is now."""
        return int(self._words[index])

    def set_word(self, index: int, value: int) -> None:
        """At once, by this CPU."""
        self._words[index] = value


class OwnBoard:
    """The draft's end makes it."""

    def __init__(self, shape: tuple[int, int]) -> None:
        """Raises BoardError: no memory to share."""
        try:
            self._own = OwnMemory(_num_bytes(shape))
        except SealedMemoryError as error:
            raise BoardError(str(error)) from None
        self.board = Board(self._own.memory, shape)
        clear_proposals(self.board.proposed)

    @property
    def handle(self) -> bytes:
        """By which another process of this user opens it."""
        return json.dumps({"memory": self._own.handle.to_bytes().decode(), "shape": self.board.shape}).encode()

    def close(self) -> None:
        """Nobody can open it any more."""
        self._own.close()


@dataclass(frozen=True, slots=True)
class OpenedBoard:
    """The end of the target, and of either model's other ranks."""

    board: Board
    owner_pid: int
    handle: bytes

    @classmethod
    def open(cls, handle: bytes) -> "OpenedBoard":
        """Raises BoardError: it is not there any more, or the handle is none."""
        try:
            fields = json.loads(handle)
            rows, columns = (int(size) for size in fields["shape"])
            memory = MemoryHandle.from_bytes(fields["memory"].encode())
            if min(rows, columns) < 1 or _num_bytes((rows, columns)) != memory.num_bytes:
                raise BoardError("its handle gives a size that is not of its shape")
            return cls(Board(open_memory(memory), (rows, columns)), memory.process_id, handle)
        except BoardError:
            raise
        except SealedMemoryError as error:
            raise BoardError(str(error)) from None
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
            raise BoardError("its handle cannot be read") from None
