"""How the steps of two processes come after one another: on a GPU its streams wait, on a CPU the caller does."""

import time
from typing import Protocol

import torch

from kimi_backend.runners.stream_memory import StreamMemory
from kimi_backend.serving.step_board import StepBoard, offset_of

_SLEEP_S = 0.00005


class BoardOrder(Protocol):
    """Queues on the device that the process computes on."""

    def wait(self, word: int, value: int) -> None:
        """What is queued after this happens when a word of the board has reached a value."""
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
    """The current stream's. The host never waits."""

    def __init__(self, board: StepBoard, device: torch.device) -> None:
        """Raises CudaIpcError: the driver or the device cannot do it."""
        self._memory = StreamMemory(board.address, board.num_bytes, device)

    def wait(self, word: int, value: int) -> None:
        self._memory.wait(offset_of(word), value)

    def write(self, word: int, value: int) -> None:
        self._memory.write(offset_of(word), value)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def close(self) -> None:
        self._memory.close()


class HostOrder:
    """A CPU's: everything happens when it is queued."""

    def __init__(self, board: StepBoard) -> None:
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


def order_of(board: StepBoard, device: torch.device) -> BoardOrder:
    """Raises CudaIpcError: the device's streams cannot wait for memory."""
    return StreamOrder(board, device) if device.type == "cuda" else HostOrder(board)
