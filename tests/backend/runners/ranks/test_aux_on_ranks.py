"""Aux buffers of several ranks: all are opened or none, and each rank gets its own. The driver's part is replaced."""

import pytest
import torch

from kimi_backend.errors import InvalidRequestError
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.aux_ipc import split_handles
from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.runners.ranks import aux_on_ranks
from kimi_backend.runners.ranks.aux_on_ranks import OpenedOnRanks, export_on_ranks
from kimi_backend.runners.ranks.worker_processes import WorkerError
from kimi_backend.runners.ranks.workers import NoWorkers

BUFFER = AuxBuffer.allocate(1, 4, 8, torch.float32, torch.device("cpu"))
CUDA = torch.device("cuda")


class AskedWorkers(NoWorkers):
    """Two workers that note what they are asked."""

    count = 2

    def __init__(self, problem: str = "") -> None:
        super().__init__()
        self.asked: list[tuple[str, list[bytes]]] = []
        self._problem = problem

    def ask(self, question: str, contents: list[bytes]) -> list[bytes]:
        self.asked.append((question, contents))
        if self._problem and any(contents):
            raise WorkerError(self._problem)
        return [b'{"rank": 1}', b'{"rank": 2}']


class FakeOpened:
    """An opened aux buffer of rank 0."""

    opened: list[bytes]

    def __init__(self, handle: bytes, device: torch.device) -> None:
        self.opened.append(handle)
        self.buffer, self._handle = BUFFER, handle

    def close(self) -> None:
        self.opened.remove(self._handle)


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeOpened.opened = []
    monkeypatch.setattr(aux_on_ranks, "export_aux_buffer", lambda buffer: b'{"rank": 0}')
    monkeypatch.setattr(aux_on_ranks, "OpenedAuxBuffer", FakeOpened)


def test_each_rank_opens_the_buffer_of_its_own() -> None:
    exported = export_on_ranks(BUFFER, AskedWorkers())
    workers = AskedWorkers()
    opened = OpenedOnRanks(exported, CUDA, workers)
    assert (opened.exported, opened.buffer) == (exported, BUFFER)
    assert FakeOpened.opened == [b'{"rank": 0}']
    assert workers.asked == [("open aux", [b'{"rank": 1}', b'{"rank": 2}'])]
    opened.close()
    assert not FakeOpened.opened
    assert workers.asked[1:] == [("open aux", [b"", b""])]


def test_one_rank_is_as_before() -> None:
    exported = export_on_ranks(BUFFER, NoWorkers())
    assert exported == b'{"rank": 0}'
    OpenedOnRanks(exported, CUDA, NoWorkers()).close()


def test_a_worker_that_cannot_open_its_own_leaves_none_open() -> None:
    workers = AskedWorkers("rank 2: another GPU")
    with pytest.raises(CudaIpcError, match="rank 2: another GPU"):
        OpenedOnRanks(export_on_ranks(BUFFER, AskedWorkers()), CUDA, workers)
    assert not FakeOpened.opened
    assert workers.asked[-1] == ("open aux", [b"", b""])


def test_other_numbers_of_ranks_share_nothing() -> None:
    with pytest.raises(CudaIpcError, match="the target has 1 ranks, the draft 3"):
        OpenedOnRanks(export_on_ranks(BUFFER, NoWorkers()), CUDA, AskedWorkers())
    with pytest.raises(InvalidRequestError, match="3 bytes that are none"):
        split_handles(b"[1]")
