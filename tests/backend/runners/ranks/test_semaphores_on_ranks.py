"""Ranks wait for the shared semaphores that rank 0 waits for. The driver's part is replaced."""

import json
import os

import pytest
import torch

from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.runners.hand_over import order as order_module
from kimi_backend.runners.hand_over.order import order_of
from kimi_backend.runners.hand_over.semaphores import (
    DRAFTED,
    OpenedSemaphores,
    OwnSemaphores,
    SemaphoreError,
    offset_of,
)
from kimi_backend.runners.ranks.messages import WorkerError
from kimi_backend.runners.ranks.workers import NoWorkers
from kimi_backend.runners.sealed_memory import MemoryHandle

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


class AskedWorkers(NoWorkers):
    """Two that open the semaphores, or do not."""

    count = 2

    def __init__(self, problem: str = "") -> None:
        super().__init__()
        self.asked: list[list[bytes]] = []
        self.waits: list[tuple[int, int]] = []
        self._problem = problem

    def ask(self, question: str, contents: list[bytes]) -> list[bytes]:
        assert question == "open semaphores"
        self.asked.append(contents)
        if self._problem and any(contents):
            raise WorkerError(self._problem)
        return contents

    def wait_before_next(self, word: int, value: int) -> None:
        self.waits.append((word, value))


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "StreamMemory", FakeMemory)


def test_a_rank_sees_the_values_of_the_semaphores() -> None:
    own = OwnSemaphores((4, 8))
    opened = OpenedSemaphores.open(own.handle)
    own.semaphores.set_value(DRAFTED, 7)
    assert opened.semaphores.value(DRAFTED) == 7
    order = order_of(opened.semaphores, CUDA)
    order.wait(DRAFTED, 7)
    memory = order._memory  # type: ignore[attr-defined]
    assert memory.waits == [(offset_of(DRAFTED), 7)]
    order.close()
    assert not memory.is_open
    own.close()


@pytest.mark.parametrize(
    "handle",
    [b"", b"[]", json.dumps({"memory": NO_SUCH.to_bytes().decode(), "shape": [4, 8]}).encode()],
    ids=["empty", "not an object", "no such descriptor"],
)
def test_memory_that_is_not_there_is_said(handle: bytes) -> None:
    with pytest.raises(SemaphoreError, match=r"its handle cannot be read|its process has it no more"):
        OpenedSemaphores.open(handle)


def test_a_handle_whose_shape_is_not_of_its_size_is_refused() -> None:
    own = OwnSemaphores((4, 8))
    handle = json.loads(own.handle) | {"shape": [4000, 8]}
    with pytest.raises(SemaphoreError, match="a size that is not of its shape"):
        OpenedSemaphores.open(json.dumps(handle).encode())
    own.close()


def test_a_descriptor_of_other_semaphores_is_refused() -> None:
    one, other = OwnSemaphores((4, 8)), OwnSemaphores((4, 8))
    fields, others = json.loads(one.handle), json.loads(json.loads(other.handle)["memory"])
    memory = json.loads(fields["memory"]) | {"descriptor": others["descriptor"]}
    with pytest.raises(SemaphoreError, match="its process has something else there"):
        OpenedSemaphores.open(json.dumps(fields | {"memory": json.dumps(memory)}).encode())
    one.close()
    other.close()


def test_workers_wait_for_what_rank_0_waits_for() -> None:
    own, workers = OwnSemaphores((4, 8)), AskedWorkers()
    order = order_of(own.semaphores, CUDA, own.handle, workers)
    order.wait(DRAFTED, 3)
    assert workers.waits == [(DRAFTED, 3)]
    order.close()
    assert workers.asked == [[own.handle] * 2, [b""] * 2]
    own.close()


def test_a_worker_that_cannot_wait_leaves_no_semaphores_open() -> None:
    own, workers = OwnSemaphores((4, 8)), AskedWorkers("rank 2: the device has no such operation")
    with pytest.raises(CudaIpcError, match="rank 2: the device has no such operation"):
        order_of(own.semaphores, CUDA, own.handle, workers)
    assert workers.asked[-1] == [b""] * 2
    own.close()
