"""Ranks meet, compute together and part: processes over gloo here, over NCCL and shared memory on GPUs."""

import re
import socket
from typing import Any

import pytest
import torch

from kimi_backend.errors import ConfigError
from kimi_backend.hosting.embedded_server import free_port
from kimi_backend.parallel import DistributedRanks, SingleRank
from kimi_backend.runners.ranks.process_group import RankError, _who_is_missing, join_ranks, leave
from support.forked_processes import run_ranks
from support.ranks import run_on_a_cpu

CPU = torch.device("cpu")


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


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
    with pytest.raises(RankError, match=r"after 0\.3 s these of 3 ranks were not there: \[1, 2\]"):
        join_ranks(0, 3, free_address(), CPU, join_timeout_s=0.3)


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(RankError, match=f"rank 0 cannot listen on {address}"):
            join_ranks(0, 2, address, CPU)


def test_no_rank_0_is_told() -> None:
    with pytest.raises(RankError, match=r"rank 1 did not find rank 0 at .* in 0\.5 s"):
        join_ranks(1, 2, free_address(), CPU, join_timeout_s=0.5)


def test_collectives_of_three_ranks_on_a_cpu() -> None:
    run_ranks(run_on_a_cpu, 3, 3, [free_address(), free_address()])


def test_a_port_that_is_held_is_used() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(RankError, match=r"these of 2 ranks were not there: \[1\]"):
        join_ranks(0, 2, address, CPU, listener=listener, join_timeout_s=0.3)
    assert listener.fileno() == -1, "the store has it now"


def test_a_process_joins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="this process has joined some already; leave them first"):
        join_ranks(1, 2, "127.0.0.1:1", CPU)


class FakeRanks:
    """Rank 1 of three, whose collectives take small tensors."""

    def takes(self, x: torch.Tensor) -> bool:
        return x.numel() < 5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * x


def test_fast_collectives_have_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = object()
    ranks = DistributedRanks(group, fast_all_reduce=FakeRanks(), fast_all_gather=FakeRanks())
    small, large = torch.ones(2, 2), torch.arange(6.0).view(2, 3)
    assert ranks.all_reduce(small).tolist() == ranks.all_gather_columns(small).tolist() == [[3, 3], [3, 3]]

    def gathered(out: torch.Tensor, x: torch.Tensor, group: object) -> None:
        out.view(3, *x.shape).copy_(torch.stack([rank * x for rank in range(3)]))

    monkeypatch.setattr("kimi_backend.parallel._all_gather", gathered)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 3)
    assert ranks.all_reduce(large).tolist() == (3 * large).tolist()
    assert ranks.all_gather_columns(large).tolist() == torch.cat([0 * large, large, 2 * large], dim=1).tolist()


def test_a_store_that_is_gone_is_told() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("closed")

    gone: Any = Gone()
    assert _who_is_missing(gone, 1, 3, "host:1", 5.0) == "rank 1 lost rank 0 at host:1"
