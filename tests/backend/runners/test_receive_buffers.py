"""Memory that ranks share: all of them or none. The driver is replaced; test_ranks_on_gpu.py has the real one."""

import threading
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from kimi_backend.runners import receive_buffers
from kimi_backend.runners.cuda_ipc import HANDLE_BYTES, CudaIpcError
from support.waiting import PATIENCE_S

CPU = torch.device("cpu")


@pytest.mark.parametrize("failing", ["export", "open", "nothing"])
def test_all_ranks_share_memory_or_none_does(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's driver refuses; here ranks are threads and their memory is host memory."""
    closed = []

    class Opened:
        def __init__(self, handle: bytes, offset: int, num_bytes: int, device: torch.device) -> None:
            if failing == "open" and handle[0] == 0:  # rank 0's, opened by rank 1
                raise CudaIpcError("cuIpcOpenMemHandle_v2: refused")
            self.address = offset

        def close(self) -> None:
            closed.append(self)

    def export(buffer: torch.Tensor) -> tuple[bytes, int]:
        rank = int(threading.current_thread().name)
        if failing == "export" and rank == 1:
            raise CudaIpcError("cuIpcGetMemHandle: refused")
        return bytes([rank]) * HANDLE_BYTES, buffer.data_ptr()

    monkeypatch.setattr(receive_buffers, "OpenedMemory", Opened)
    monkeypatch.setattr(receive_buffers, "export_memory", export)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    store, shared = HashStore(), {}

    def share(rank: int) -> None:
        shared[rank] = receive_buffers.share_memory(store, rank, 2, CPU)

    threads = [threading.Thread(target=share, args=(rank,), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if failing == "nothing":
        assert all(isinstance(memory, receive_buffers.SharedMemory) for memory in shared.values())
        assert not closed
        for memory in shared.values():
            for name, addresses in memory.addresses.items():
                assert addresses == [shared[rank].own[name].data_ptr() for rank in range(2)]
            assert len(memory.addresses) == 5
            memory.close()
    else:
        assert shared == {0: None, 1: None}
    assert len(closed) == {"export": 0, "open": 5, "nothing": 10}[failing], "five buffers a rank"


def test_the_first_sum_that_takes_a_tensor_has_it() -> None:
    class UpTo:
        def __init__(self, most: int) -> None:
            self.most = most

        def takes(self, x: torch.Tensor) -> bool:
            return x.numel() <= self.most

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.most

    either = receive_buffers.EitherAllReduce(UpTo(2), UpTo(4))
    taken = [either.takes(torch.ones(count)) for count in (2, 4, 5)]
    assert taken == [True, True, False]
    assert [either(torch.ones(count))[0].item() for count in (2, 3)] == [2, 4]


def test_the_first_sum_with_a_norm_that_takes_a_tensor_has_it() -> None:
    class UpTo:
        def __init__(self, most: int) -> None:
            self.most = most

        def takes(self, x: torch.Tensor) -> bool:
            return x.numel() <= self.most

        def __call__(self, *given: object) -> tuple[object, ...]:
            return (self.most, *given)

    either: Any = receive_buffers.EitherAllReduceNorm(UpTo(2), UpTo(4))  # type: ignore[arg-type]
    assert [either.takes(torch.ones(count)) for count in (2, 4, 5)] == [True, True, False]
    for count, most in ((2, 2), (3, 4)):
        x = torch.ones(count)
        assert either(x, "residual", "weight", 1e-5, "second") == (most, x, "residual", "weight", 1e-5, "second")


def test_numbers_of_ranks_that_no_limits_are_known_for_share_nothing() -> None:
    assert receive_buffers.share_memory(HashStore(), 0, 3, CPU) is None
