"""Shared semaphores: memory of the host that the draft's process and the target's have both mapped, for what a step of
one tells the other while the hosts know nothing of it yet (docs/decisions/0016).

Its semaphores have values that only grow and are step ids; behind them are both halves of the token table. Each process
writes its own semaphores and its own half, by the stream that computes them, and the stream of the other process waits
for a semaphore to reach a value. The memory is the host's, so that a process can let its own stream go when the other
has died.
"""

import json
import mmap
from dataclasses import dataclass

import numpy as np
import torch

from kimi_backend.runners.hand_over.token_table import clear_proposals
from kimi_backend.runners.sealed_memory import MemoryHandle, OwnMemory, SealedMemoryError, open_memory

TARGET_PID, WAITED, PROMISED, VERIFIED, QUEUED, DRAFTED = range(1, 7)
"""The places behind the memory's token. TARGET_PID: the process that has opened it. Then semaphores, WAITED: the last
verify that the draft waits for; PROMISED: the last that the target was given; VERIFIED: the last that is done. QUEUED:
the last draft step that the draft was given; DRAFTED: the last that is done."""
_LINE_BYTES = 64
_VALUES_PER_LINE = _LINE_BYTES // 8
_NUM_LINES = 8


class SemaphoreError(SealedMemoryError):
    """There is no such memory, or not any more."""


def offset_of(place: int) -> int:
    """Bytes from the memory's start. Each value has a cache line of its own."""
    return place * _LINE_BYTES


def _num_bytes(shape: tuple[int, int]) -> int:
    needed = _NUM_LINES * _LINE_BYTES + 2 * 4 * shape[0] * shape[1]
    return -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedSemaphores:
    """One mapping of the memory. It goes when no process has it any more."""

    def __init__(self, memory: mmap.mmap, shape: tuple[int, int]) -> None:
        """shape: [rows, columns] of both halves of the token table."""
        self.shape, self.num_bytes = shape, _num_bytes(shape)
        self._values = np.frombuffer(memory, np.int64, _NUM_LINES * _VALUES_PER_LINE)[::_VALUES_PER_LINE]
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)
        halves = self._whole[_NUM_LINES * _LINE_BYTES :][: 8 * shape[0] * shape[1]].view(torch.int32)
        self.drawn, self.proposed = halves.view(2, *shape)
        """[rows, columns] int32: the target's half of the token table, and the draft's."""

    @property
    def address(self) -> int:
        """The memory's address in this process."""
        return self._whole.data_ptr()

    def value(self, place: int) -> int:
        """Read it as it is now."""
        return int(self._values[place])

    def set_value(self, place: int, value: int) -> None:
        """Write it at once, by this CPU."""
        self._values[place] = value


class OwnSemaphores:
    """The draft's end, which makes the memory."""

    def __init__(self, shape: tuple[int, int]) -> None:
        """Raises SemaphoreError: no memory to share."""
        try:
            self._own = OwnMemory(_num_bytes(shape))
        except SealedMemoryError as error:
            raise SemaphoreError(str(error)) from None
        self.semaphores = SharedSemaphores(self._own.memory, shape)
        clear_proposals(self.semaphores.proposed)

    @property
    def handle(self) -> bytes:
        """The handle by which another process of this user opens it."""
        return json.dumps({"memory": self._own.handle.to_bytes().decode(), "shape": self.semaphores.shape}).encode()

    def close(self) -> None:
        """Nobody can open it any more."""
        self._own.close()


@dataclass(frozen=True, slots=True)
class OpenedSemaphores:
    """The end of the target, and of either model's other ranks."""

    semaphores: SharedSemaphores
    owner_pid: int
    handle: bytes

    @classmethod
    def open(cls, handle: bytes) -> "OpenedSemaphores":
        """Raises SemaphoreError: it is not there any more, or the handle is none."""
        try:
            fields = json.loads(handle)
            rows, columns = (int(size) for size in fields["shape"])
            memory = MemoryHandle.from_bytes(fields["memory"].encode())
            if min(rows, columns) < 1 or _num_bytes((rows, columns)) != memory.num_bytes:
                raise SemaphoreError("its handle gives a size that is not of its shape")
            return cls(SharedSemaphores(open_memory(memory), (rows, columns)), memory.process_id, handle)
        except SemaphoreError:
            raise
        except SealedMemoryError as error:
            raise SemaphoreError(str(error)) from None
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
            raise SemaphoreError("its handle cannot be read") from None
