"""How the steps of two processes come after one another: on a GPU its streams wait, on a CPU the caller does."""

import time
from contextlib import suppress
from typing import Protocol

import torch

from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.runners.hand_over.board import Board, offset_of
from kimi_backend.runners.hand_over.stream_memory import StreamMemory
from kimi_backend.runners.ranks.messages import OPEN_BOARD, WorkerError
from kimi_backend.runners.ranks.workers import NO_WORKERS, Workers

_SLEEP_S = 0.00005


class BoardOrder(Protocol):
    """Queues on the device that the process computes on."""

    def wait(self, word: int, value: int) -> None:
        """Let what is queued after this happen when a word of the board has reached a value."""
        ...

    def write(self, word: int, value: int) -> None:
        """Set a word when all that was queued before is done."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Contiguous tensors of one size, one of them on the board."""
        ...

    def close(self) -> None:
        """Wait for what is queued, and leave the board alone from then on."""
        ...


class StreamOrder:
    """The current stream's. The host never waits. The workers' streams wait before their next step for the same
    words: in a collective they would keep the other process from their GPUs meanwhile."""

    def __init__(self, board: Board, device: torch.device, handle: bytes, workers: Workers) -> None:
        """Raises CudaIpcError: the driver or the device cannot do it, or a worker's."""
        self._memory, self._workers = StreamMemory(board.address, board.num_bytes, device), workers
        try:
            workers.ask(OPEN_BOARD, [handle] * workers.count)
        except WorkerError as error:
            self.close()
            raise CudaIpcError(str(error)) from None

    def wait(self, word: int, value: int) -> None:
        self._memory.wait(offset_of(word), value)
        self._workers.wait_before_next(word, value)

    def write(self, word: int, value: int) -> None:
        self._memory.write(offset_of(word), value)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def close(self) -> None:
        with suppress(WorkerError):
            self._workers.ask(OPEN_BOARD, [b""] * self._workers.count)
        self._memory.close()


class HostOrder:
    """A CPU's: everything happens when it is queued."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def wait(self, word: int, value: int) -> None:
        while self._board.word(word) < value:
            time.sleep(_SLEEP_S)

    def write(self, word: int, value: int) -> None:
        self._board.set_word(word, value)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def close(self) -> None:
        return None


def order_of(board: Board, device: torch.device, handle: bytes = b"", workers: Workers = NO_WORKERS) -> BoardOrder:
    """
    Args:
        handle: of the board, for the workers.
        workers: the other ranks. On a CPU they are told of a step when its wait is over.

    Raises:
        CudaIpcError: the device's streams cannot wait for memory.
    """
    return HostOrder(board) if device.type != "cuda" else StreamOrder(board, device, handle, workers)
