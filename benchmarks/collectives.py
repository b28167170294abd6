"""Time the collectives of a tensor-parallel decode step on the GPUs of this host.

    PYTHONPATH=kernels:backend python benchmarks/collectives.py --out results/collectives.json [--ranks 2]
    PYTHONPATH=kernels:backend python benchmarks/collectives.py --cpu --ranks 8

One process a GPU. Calls are made as a step makes them, one behind the other in a CUDA graph; the median of the replays
over the number of calls is printed, of the slowest rank. For the sum of [rows, 7168] bf16 and the gather of float32
logits: NCCL's, and those of `kimi_kernels.collectives`, whose results are compared with NCCL's, and between the ranks
bit by bit. The floor is the bytes that a rank sends over --link-gbps, NVLink's rate in one direction (450 on H100 and
H200): latency is not in it. With --cpu processes of this CPU do the same over gloo, one call at a time.
"""

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kimi_backend.parallel import DistributedRanks
from kimi_backend.runners.graphs.recorder import GraphRecorder
from kimi_backend.runners.ranks.process_group import join_ranks, leave
from kimi_backend.runners.receive_buffers import EitherAllReduce

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
    """The size of one rank's part."""
    time_us: float
    floor_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--link-gbps", type=float, default=450.0)
    parser.add_argument("--programs", type=int, help="most programs of a call of collectives; its own choice if absent")
    parser.add_argument("--cpu", action="store_true", help="over gloo, without GPUs")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    if options.ranks < 2 or (options.ranks > torch.cuda.device_count() and not options.cpu):
        sys.exit(
            f"--ranks is {options.ranks}; allowed here: 2 to {torch.cuda.device_count()}, the GPUs that torch sees"
        )
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    mp.spawn(run_rank, args=(options.ranks, address, options), nprocs=options.ranks)


def run_rank(rank: int, size: int, address: str, options: argparse.Namespace) -> None:
    """A process of `main`."""
    device = torch.device("cpu") if options.cpu else torch.device("cuda", rank)
    card = "CPU" if options.cpu else torch.cuda.get_device_name(device)
    say(rank, f"{card} x {size}, torch {torch.__version__}")
    if options.cpu:
        torch.set_num_threads(1)
        group, taken = join_ranks(rank, size, address, device), 0.0
        assert isinstance(group, DistributedRanks)
    else:
        group, taken = join_on_gpu(rank, size, address, device, options.programs)
        say(rank, f"NCCL and the receive buffers take {taken:.0f} MiB of each GPU")
    results = Measuring(group, device, options.link_gbps).measure_all()
    out: Path | None = options.out
    if rank == 0 and out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "card": card,
            "ranks": size,
            "torch": torch.__version__,
            "mebibytes_taken": taken,
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(sys.argv),
            "results": [asdict(row) for row in results],
        }
        out.write_text(json.dumps(report, indent=1))
    leave(group)


def join_on_gpu(
    rank: int, size: int, address: str, device: torch.device, programs: int | None
) -> tuple[DistributedRanks, float]:
    """The group, whose GPUs share memory, and the MiB of this GPU that it takes."""
    torch.empty(1, device=device)
    free = torch.cuda.mem_get_info(device)[0]
    group = join_ranks(rank, size, address, device)
    assert isinstance(group, DistributedRanks)
    sums = group.fast_all_reduce
    if not isinstance(sums, EitherAllReduce) or group.fast_all_gather is None:
        sys.exit("the GPUs do not share memory: only NCCL could be measured")
    if programs:
        for call in (sums.one_shot, sums.two_shot, group.fast_all_gather):
            call.most_programs = programs
    dist.all_reduce(torch.zeros(1 << 24, device=device), group=group.group)
    group.all_gather_columns(torch.zeros(1 << 10, 1 << 10, device=device))
    torch.cuda.empty_cache()
    return group, (free - torch.cuda.mem_get_info(device)[0]) / 2**20


class Measuring:
    """All sums and gathers of one rank, in the order in which every rank calls them."""

    def __init__(self, group: DistributedRanks, device: torch.device, link_gbps: float) -> None:
        self._group, self._device, self._link_gbps = group, device, link_gbps
        self._plain = DistributedRanks(group.group)
        self._library = "gloo" if device.type == "cpu" else "NCCL"
        self._rows: list[Row] = []

    def measure_all(self) -> list[Row]:
        """Microseconds a call, of the slowest rank."""
        for rows in SUM_ROWS:
            self._sums(rows)
        for rows in GATHER_ROWS:
            self._gathers(rows)
        return self._rows

    def _sums(self, rows: int) -> None:
        size = self._group.size
        x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=self._device)
        sent = x.nbytes * 2 * (size - 1) / size
        check_sum(self._group, x)
        sums = self._group.fast_all_reduce
        if isinstance(sums, EitherAllReduce) and sums.takes(x):
            if sums.one_shot.takes(x):
                self._measure("sum, whole", rows, x.nbytes, x.nbytes * (size - 1), partial(sums.one_shot, x))
            self._measure("sum, in parts", rows, x.nbytes, sent, partial(sums.two_shot, x))
        zeros = torch.zeros_like(x)  # summed in place again and again
        self._measure(f"sum, {self._library}", rows, x.nbytes, sent, partial(self._plain.all_reduce, zeros))

    def _gathers(self, rows: int) -> None:
        group, size = self._group, self._group.size
        logits = torch.randn(rows, VOCAB // size, device=self._device)
        sent = logits.nbytes * (size - 1)
        assert torch.equal(group.all_gather_columns(logits), self._plain.all_gather_columns(logits))
        if group.fast_all_gather is not None and group.fast_all_gather.takes(logits):
            fast = partial(group.all_gather_columns, logits)
            self._measure("gather, receive buffer", rows, logits.nbytes, sent, fast)
        plain = partial(self._plain.all_gather_columns, logits)
        self._measure(f"gather, {self._library}", rows, logits.nbytes, sent, plain)
        values, ids = logits.max(dim=1)
        call = partial(group.all_argmax, values, ids)
        self._measure(f"argmax, {self._library}", rows, 16 * rows, 16 * rows * (size - 1), call)

    def _measure(self, op: str, rows: int, num_bytes: int, sent: float, call: Callable[[], object]) -> None:
        time_call = time_on_cpu if self._device.type == "cpu" else time_in_graph
        time_us, floor_us = time_call(call, self._group), sent / (self._link_gbps * 1e3)
        row = Row(op=op, rows=rows, kilobytes=num_bytes / 1e3, time_us=time_us, floor_us=floor_us)
        self._rows.append(row)
        ratio = f", {row.time_us / row.floor_us:6.1f} x floor" if self._device.type != "cpu" else ""
        say(self._group.rank, f"{op:22} {rows:4} rows {row.kilobytes:9.1f} kB {row.time_us:8.1f} us{ratio}")


def time_on_cpu(call: Callable[[], object], group: DistributedRanks) -> float:
    """Microseconds of one call, of the slowest rank."""
    dist.barrier(group.group)
    start = time.perf_counter()
    call()
    slowest = torch.tensor([1e6 * (time.perf_counter() - start)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group.group)
    return float(slowest)


def time_in_graph(call: Callable[[], object], group: DistributedRanks) -> float:
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
    """Against float32, and bit by bit between the ranks. The libraries round every term that they add."""
    expected, magnitude = x.float(), x.float().abs()
    for terms in (expected, magnitude):
        dist.all_reduce(terms, group=group.group)
    summed = group.all_reduce(x.clone())
    is_ours = group.fast_all_reduce is not None and group.fast_all_reduce.takes(x)
    allowed = 2**-8 * (expected.abs() if is_ours else (group.size - 1) * magnitude) + 1e-5
    assert bool(((summed.float() - expected).abs() <= allowed).all()), f"{len(x)} rows: not the sum"
    bits = group.all_gather_columns(summed).chunk(group.size, dim=1)
    assert all(torch.equal(part, bits[0]) for part in bits), "ranks differ"


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
