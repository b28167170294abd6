"""Ranks meet, compute together and part: processes over gloo here, over NCCL and shared memory on GPUs."""

import re
import socket
import threading
import time

import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed import HashStore

from kimi_backend.errors import ConfigError
from kimi_backend.parallel import SingleRank
from kimi_backend.runners import joining
from kimi_backend.runners.cuda_ipc import HANDLE_BYTES, CudaIpcError
from kimi_backend.runners.joining import RankError, join_ranks, leave
from support.joined_ranks import run_on_a_cpu

CPU = torch.device("cpu")


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_one_rank_needs_nobody() -> None:
    group = join_ranks(0, 1, "nowhere", CPU)
    assert isinstance(group, SingleRank)
    leave(group)


@pytest.mark.parametrize(
    ("rank", "address", "device", "message"),
    [
        (2, "127.0.0.1:1", "cpu", "rank: 2 given, of 2 ranks; allowed: 0 to 1"),
        (0, "127.0.0.1", "cpu", "'127.0.0.1' given; HOST:PORT is allowed"),
        (1, "127.0.0.1:80", "cuda", "device: cuda given for rank 1; one with its index is allowed, such as cuda:1"),
    ],
)
def test_what_no_rank_can_be_is_refused(rank: int, address: str, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        join_ranks(rank, 2, address, torch.device(device))


def test_a_rank_that_does_not_come_is_named() -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"after 0\.3 s these of 3 ranks were not there: \[1, 2\]"):
        join_ranks(0, 3, free_address(), CPU, join_timeout_s=0.3)
    assert time.monotonic() - began < 5


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(RankError, match=f"rank 0 cannot listen on {address}"):
            join_ranks(0, 2, address, CPU)


def test_no_rank_0_is_told() -> None:
    with pytest.raises(RankError, match=r"rank 1 did not find rank 0 at .* in 0\.5 s"):
        join_ranks(1, 2, free_address(), CPU, join_timeout_s=0.5)


def test_collectives_of_three_ranks_on_a_cpu() -> None:
    mp.spawn(run_on_a_cpu, args=(3, [free_address(), free_address()]), nprocs=3)


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

    def export(inbox: torch.Tensor) -> tuple[bytes, int]:
        rank = int(threading.current_thread().name)
        if failing == "export" and rank == 1:
            raise CudaIpcError("cuIpcGetMemHandle: refused")
        return bytes([rank]) * HANDLE_BYTES, inbox.data_ptr()

    monkeypatch.setattr(joining, "OpenedMemory", Opened)
    monkeypatch.setattr(joining, "export_memory", export)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    store, shared = HashStore(), {}

    def share(rank: int) -> None:
        shared[rank] = joining._share_memory(store, rank, 2, CPU)

    threads = [threading.Thread(target=share, args=(rank,), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if failing == "nothing":
        assert all(isinstance(memory, joining.SharedMemory) for memory in shared.values())
        assert not closed
        for memory in shared.values():
            assert memory.addresses == shared[0].addresses
            memory.close()
    else:
        assert shared == {0: None, 1: None}
    assert len(closed) == {"export": 0, "open": 3, "nothing": 6}[failing], "three inboxes a rank"


def test_a_port_that_is_held_is_used() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(RankError, match=r"these of 2 ranks were not there: \[1\]"):
        join_ranks(0, 2, address, CPU, listener=listener, join_timeout_s=0.3)
    assert listener.fileno() == -1, "the store has it now"


def test_the_first_sum_that_takes_a_tensor_has_it() -> None:
    class UpTo:
        def __init__(self, most: int) -> None:
            self.most = most

        def takes(self, x: torch.Tensor) -> bool:
            return x.numel() <= self.most

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.most

    either = joining.EitherSum(UpTo(2), UpTo(4))
    taken = [either.takes(torch.ones(count)) for count in (2, 4, 5)]
    assert taken == [True, True, False]
    assert [either(torch.ones(count))[0].item() for count in (2, 3)] == [2, 4]
