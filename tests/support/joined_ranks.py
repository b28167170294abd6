"""The work of a process of a tensor-parallel group in tests of joining, apart from serving a model."""

import os
from pathlib import Path

import torch

from kimi_backend.parallel import TensorParallelGroup
from kimi_backend.runners.ranks.joining import join_ranks, leave

CPU = torch.device("cpu")


def run_on_a_cpu(rank: int, size: int, addresses: list[str]) -> None:
    """Join at each address in turn; all values are checked on every rank against what all ranks are known to hold."""
    torch.set_num_threads(1)
    for address in addresses:
        group = join_ranks(rank, size, address, CPU)
        assert (group.rank, group.size) == (rank, size)
        check_collectives(group, CPU)
        assert listening_addresses() <= {"0100007F"}, "somebody outside of this host could connect"
        leave(group)
        leave(group)


def listening_addresses() -> set[str]:
    """At which this process listens, as /proc/net/tcp has them: 0100007F is 127.0.0.1, 00000000 any."""
    sockets = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].split(":")[0])
    return found


def check_collectives(group: TensorParallelGroup, device: torch.device) -> None:
    """On three ranks or two."""
    for dtype in (torch.float32, torch.bfloat16):
        summed = group.all_reduce(torch.full((4, 3), float(group.rank + 1), dtype=dtype, device=device))
        total = float(sum(range(1, group.size + 1)))
        assert torch.equal(summed, torch.full((4, 3), total, dtype=dtype, device=device))
        _check_gather(group, dtype, device)
    _check_argmax(group, device)


def _check_gather(group: TensorParallelGroup, dtype: torch.dtype, device: torch.device) -> None:
    parts = [torch.arange(10, dtype=dtype, device=device).view(2, 5) + 10 * rank for rank in range(group.size)]
    gathered = group.all_gather_columns(parts[group.rank])
    assert gathered.dtype == dtype
    assert torch.equal(gathered, torch.cat(parts, dim=1))


def _check_argmax(group: TensorParallelGroup, device: torch.device) -> None:
    """Columns: a clear best, equals of which the lowest id counts, infinities, a NaN on one rank."""
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([[1, 5, -inf, 1], [2, 5, -inf, nan], [0.5, 4, -inf, 3]], device=device)
    token_ids = torch.tensor([[7, 9, 5, 1], [163_839, 8, 4, 2], [3, 1, 6, 3]], device=device)
    best, best_ids = group.all_argmax(values[group.rank], token_ids[group.rank])
    assert best.dtype == torch.float32
    assert best_ids.dtype == torch.int64
    expected = torch.tensor([2, 5, -inf, nan], device=device)
    torch.testing.assert_close(best, expected, rtol=0, atol=0, equal_nan=True)
    assert best_ids[:3].tolist() == [163_839, 8, 4]
