"""A rank's view of the board's numbers. The driver's part is replaced."""

import json
import os

import numpy as np
import pytest
import torch

from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.runners.ranks import board_words
from kimi_backend.runners.ranks.board_words import BoardWords
from kimi_backend.runners.ranks.peers import NoPeers
from kimi_backend.runners.ranks.workers import PeerError
from kimi_backend.runners.sealed_memory import MemoryHandle
from kimi_backend.serving import board_order
from kimi_backend.serving.board_order import order_of
from kimi_backend.serving.step_board import LEFT, OpenedBoard, OwnBoard, offset_of

CUDA = torch.device("cuda")
NO_SUCH = MemoryHandle(process_id=os.getpid(), descriptor=9999, num_bytes=4096, token="00")


class FakeMemory:
    """Keeps what a stream would wait for."""

    def __init__(self, address: int, num_bytes: int, device: torch.device) -> None:
        self.waits: list[tuple[int, int]] = []
        self.is_open = True

    def wait(self, offset: int, value: int) -> None:
        self.waits.append((offset, value))

    def close(self) -> None:
        self.is_open = False


class AskedPeers(NoPeers):
    """Two that open the board, or do not."""

    count = 2

    def __init__(self, problem: str = "") -> None:
        super().__init__()
        self.asked: list[list[bytes]] = []
        self.waits: list[tuple[int, int]] = []
        self._problem = problem

    def ask(self, question: str, contents: list[bytes]) -> list[bytes]:
        assert question == "open board"
        self.asked.append(contents)
        if self._problem and any(contents):
            raise PeerError(self._problem)
        return contents

    def wait_before_next(self, offset: int, value: int) -> None:
        self.waits.append((offset, value))


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_words, "StreamMemory", FakeMemory)
    monkeypatch.setattr(board_order, "StreamMemory", FakeMemory)


def test_a_rank_sees_the_numbers_of_the_board() -> None:
    own = OwnBoard((4, 8))
    assert OpenedBoard.open(own.handle).memory_handle == own.memory_handle
    words = BoardWords(own.memory_handle, CUDA)
    own.board.set_word(LEFT, 7)
    assert words._whole.numpy()[offset_of(LEFT) :][:8].view(np.int64)[0] == 7
    words.wait(offset_of(LEFT), 7)
    memory = words._memory
    assert isinstance(memory, FakeMemory) and memory.waits == [(offset_of(LEFT), 7)]
    words.close()
    assert not memory.is_open
    own.close()


@pytest.mark.parametrize(
    "handle",
    [b"", b"[]", NO_SUCH.to_bytes()],
    ids=["empty", "not an object", "no such descriptor"],
)
def test_memory_that_is_not_there_is_said(handle: bytes) -> None:
    with pytest.raises(CudaIpcError, match="the board: "):
        BoardWords(handle, CUDA)


def test_a_descriptor_that_is_another_board_s_is_refused() -> None:
    one, other = OwnBoard((4, 8)), OwnBoard((4, 8))
    handle = json.loads(one.memory_handle) | {"descriptor": json.loads(other.memory_handle)["descriptor"]}
    with pytest.raises(CudaIpcError, match="the board: its process has something else there"):
        BoardWords(json.dumps(handle).encode(), CUDA)
    one.close()
    other.close()


def test_peers_wait_for_what_rank_0_waits_for() -> None:
    own, peers = OwnBoard((4, 8)), AskedPeers()
    order = order_of(own.board, CUDA, own.memory_handle, peers)
    order.wait(LEFT, 3)
    assert peers.waits == [(offset_of(LEFT), 3)]
    order.close()
    assert peers.asked == [[own.memory_handle] * 2, [b""] * 2]
    own.close()


def test_a_peer_that_cannot_wait_leaves_no_board_open() -> None:
    own, peers = OwnBoard((4, 8)), AskedPeers("rank 2: the device has no such operation")
    with pytest.raises(CudaIpcError, match="rank 2: the device has no such operation"):
        order_of(own.board, CUDA, own.memory_handle, peers)
    assert peers.asked[-1] == [b""] * 2
    own.close()
