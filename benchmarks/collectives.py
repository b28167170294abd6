"""Time the collectives of a tensor-parallel decode step on the GPUs of this host.

    PYTHONPATH=kernels:backend python benchmarks/collectives.py --out results/collectives.json [--ranks 2]

One process a GPU. Calls are made as a step makes them, one behind the other in a CUDA graph; the median of the replays
over the number of calls is printed, of the slowest rank. For the sum of [rows, 7168] bf16 and the gather of float32
logits: NCCL's, and those of `kimi_kernels.rank_exchange`, whose results are compared with NCCL's, and between the ranks
bit by bit. The floor is the bytes that a rank sends over --link-gbps, NVLink's rate in one direction (450 on H100 and
H200): latency is not in it.
"""

import argparse
import functools
import json
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kimi_backend.parallel import DistributedRanks
from kimi_backend.runners.graphs.recorder import GraphRecorder
from kimi_backend.runners.inboxes import EitherSum
from kimi_backend.runners.ranks.joining import join_ranks, leave

HIDDEN, VOCAB = 7168, 163_840
SUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
GATHER_ROWS = (1, 4, 16, 64, 256)
CALLS, REPLAYS = 50, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement; microseconds a call."""

    op: str
    rows: int
    kilobytes: float
    """Of one rank's part."""
    time_us: float
    floor_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--link-gbps", type=float, default=450.0)
    parser.add_argument(
        "--programs", type=int, help="most programs of a call of rank_exchange; its own choice if absent"
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    if options.ranks < 2 or options.ranks > torch.cuda.device_count():
        sys.exit(
            f"--ranks is {options.ranks}; allowed here: 2 to {torch.cuda.device_count()}, the GPUs that torch sees"
        )
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    mp.spawn(run_rank, args=(options.ranks, address, options), nprocs=options.ranks)


def run_rank(rank: int, size: int, address: str, options: argparse.Namespace) -> None:
    """A process of `main`."""
    device = torch.device("cuda", rank)
    torch.empty(1, device=device)
    free = torch.cuda.mem_get_info(device)[0]
    group = join_ranks(rank, size, address, device)
    assert isinstance(group, DistributedRanks)
    say(rank, f"{torch.cuda.get_device_name()} x {size}, torch {torch.__version__}")
    sums = group.fast_sum
    if not isinstance(sums, EitherSum) or group.fast_gather is None:
        sys.exit("the GPUs do not share memory: only NCCL could be measured")
    if options.programs:
        for call in (sums.whole, sums.in_parts, group.fast_gather):
            call.most_programs = options.programs
    dist.all_reduce(torch.zeros(1 << 24, device=device), group=group.group)
    group.all_gather_columns(torch.zeros(1 << 10, 1 << 10, device=device))
    torch.cuda.empty_cache()
    taken = (free - torch.cuda.mem_get_info(device)[0]) / 2**20
    say(rank, f"NCCL and the inboxes take {taken:.0f} MiB of each GPU")
    results: list[Row] = []

    def measure(op: str, rows: int, num_bytes: int, sent: float, call: Callable[[], object]) -> None:
        row = Row(
            op=op,
            rows=rows,
            kilobytes=num_bytes / 1e3,
            time_us=time_call(call, group),
            floor_us=sent / (options.link_gbps * 1e3),
        )
        results.append(row)
        ratio = row.time_us / row.floor_us
        say(rank, f"{op:22} {rows:4} rows {row.kilobytes:9.1f} kB {row.time_us:8.1f} us, {ratio:6.1f} x floor")

    nccl = DistributedRanks(group.group)
    for rows in SUM_ROWS:
        x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
        if sums.takes(x):
            check_sum(group, x)
            if sums.whole.takes(x):
                measure("sum, whole", rows, x.nbytes, x.nbytes * (size - 1), functools.partial(sums.whole, x))
            sent = x.nbytes * 2 * (size - 1) / size
            measure("sum, in parts", rows, x.nbytes, sent, functools.partial(sums.in_parts, x))
        sent = x.nbytes * 2 * (size - 1) / size
        zeros = torch.zeros_like(x)  # summed in place again and again
        measure("sum, NCCL", rows, x.nbytes, sent, functools.partial(nccl.all_reduce, zeros))
    for rows in GATHER_ROWS:
        logits = torch.randn(rows, VOCAB // size, device="cuda")
        sent = logits.nbytes * (size - 1)
        if group.fast_gather.takes(logits):
            assert torch.equal(group.all_gather_columns(logits), nccl.all_gather_columns(logits))
            measure("gather, inbox", rows, logits.nbytes, sent, functools.partial(group.all_gather_columns, logits))
        measure("gather, NCCL", rows, logits.nbytes, sent, functools.partial(nccl.all_gather_columns, logits))
    values, ids = logits.max(dim=1)
    measure("argmax, NCCL", rows, 16 * rows, 16 * rows * (size - 1), functools.partial(group.all_argmax, values, ids))
    out: Path | None = options.out
    if rank == 0 and out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "card": torch.cuda.get_device_name(),
            "ranks": size,
            "torch": torch.__version__,
            "mebibytes_taken": taken,
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(sys.argv),
            "results": [asdict(row) for row in results],
        }
        out.write_text(json.dumps(report, indent=1))
    leave(group)


def time_call(call: Callable[[], object], group: DistributedRanks) -> float:
    """Microseconds a call in a graph, of the slowest rank."""

    def run() -> None:
        for _ in range(CALLS):
            call()

    replay = GraphRecorder(torch.device("cuda", group.rank)).record(run)
    times = []
    for _ in range(REPLAYS):
        dist.barrier(group.group)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    slowest = torch.tensor([statistics.median(times)], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group.group)
    return float(slowest)


def check_sum(group: DistributedRanks, x: torch.Tensor) -> None:
    """Against float32, and bit by bit between the ranks."""
    expected = x.float()
    dist.all_reduce(expected, group=group.group)
    summed = group.all_reduce(x.clone())
    torch.testing.assert_close(summed.float(), expected, rtol=2**-8, atol=1e-5)
    bits = group.all_gather_columns(summed).chunk(group.size, dim=1)
    assert all(torch.equal(part, bits[0]) for part in bits), "ranks differ"


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
