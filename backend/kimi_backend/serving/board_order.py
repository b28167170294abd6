"""How the steps of two processes come after one another: on a GPU its streams wait, on a CPU the caller does."""

import time
from contextlib import suppress
from typing import Protocol

import torch

from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.runners.ranks.follower import OPEN_BOARD
from kimi_backend.runners.ranks.peers import NO_PEERS, Peers
from kimi_backend.runners.ranks.workers import PeerError
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


class OrderOnRanks:
    """Of rank 0's stream. The streams of its peers wait before their next step for what it waits for: in a collective
    they would keep the other process from their GPUs meanwhile."""

    def __init__(self, own: BoardOrder, peers: Peers, handle: bytes) -> None:
        """
        Args:
            handle: of the board's memory (`board_words`).

        Raises:
            CudaIpcError: a peer's device cannot wait for it.
        """
        self._own, self._peers = own, peers
        try:
            peers.ask(OPEN_BOARD, [handle] * peers.count)
        except PeerError as error:
            self.close()
            raise CudaIpcError(str(error)) from None

    def wait(self, word: int, value: int) -> None:
        self._own.wait(word, value)
        self._peers.wait_before_next(offset_of(word), value)

    def write(self, word: int, value: int) -> None:
        self._own.write(word, value)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._own.copy(target, source)

    def close(self) -> None:
        with suppress(PeerError):
            self._peers.ask(OPEN_BOARD, [b""] * self._peers.count)
        self._own.close()


def order_of(board: StepBoard, device: torch.device, handle: bytes = b"", peers: Peers = NO_PEERS) -> BoardOrder:
    """
    Args:
        handle: of the board's memory, for the peers.
        peers: the other ranks. On a CPU they are told of a step when its wait is over.

    Raises:
        CudaIpcError: the device's streams cannot wait for memory.
    """
    if device.type != "cuda":
        return HostOrder(board)
    own = StreamOrder(board, device)
    return OrderOnRanks(own, peers, handle) if peers.count else own
