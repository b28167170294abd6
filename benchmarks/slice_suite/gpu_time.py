"""The GPU's time in a round by kind of kernel, as its own profiler sees it: inside graphs too."""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = (
    (
        "experts",
        r"gate_up|down_few|down_sorted|down_tall|sum_assignments|place_kernel|sort_|overlapped|count_|scatter_",
    ),
    ("attention", r"attend|merge_|plan_balanced|plan_|prefill|gather_latent|store_latent|store_kv|absorb"),
    ("sums over ranks", r"rank_sum|rank_gather|sum_in_parts|all_reduce_norm"),
    ("sampling", r"draw|sample|noise|select|process_|candidate|logprob|verify_kernel|accept|mass|shard|check_kernel"),
    ("router", r"route"),
    ("quantised products", r"tiled_linear"),
    ("dense products", r"stream_linear|head_linear|silu_down|nvjet|cutlass|gemm|gemv|splitKreduce|cublas"),
    ("norms and activation", r"rms_norm|silu|rope"),
    ("copies", r"^Mem(cpy|set)"),
    ("small tensor operations", r"at::|at_cuda|elementwise|compute_cuda|cub::|metadata|_rows_kernel"),
)
OTHER = "other"
NUM_LISTED = 40
NUM_LAST_LEFT_OUT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTime:
    """The GPU's time in one round, microseconds."""

    busy_us: float
    num_kernels: float
    by_kind: dict[str, float]
    kernels: list[dict[str, Any]]
    """The longest: name, how often a round, microseconds in all."""
    covered_us: float = 0.0
    """Time in which at least one kernel was on the GPU; kernels that start early overlap, so it is below `busy_us`."""
    idle: list[dict[str, Any]] = field(default_factory=list)
    """The longest gaps: kernel before, kernel after, how often a round, microseconds in all."""


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), OTHER)


def profile_rounds(run: Callable[[], object], num_rounds: int) -> GpuTime:
    """Run `num_rounds` rounds under the profiler."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    by_kind: dict[str, float] = defaultdict(float)
    kernels = []
    for event in profiler.key_averages():
        if event.device_type != torch.autograd.DeviceType.CUDA or not event.self_device_time_total:
            continue
        total_us = event.self_device_time_total / num_rounds
        by_kind[kind_of(event.key)] += total_us
        kernels.append({"name": event.key[:120], "times": event.count / num_rounds, "us": round(total_us, 2)})
    kernels.sort(key=lambda kernel: -kernel["us"])
    return GpuTime(
        busy_us=round(sum(by_kind.values()), 1),
        num_kernels=sum(kernel["times"] for kernel in kernels),
        by_kind={kind: round(us, 1) for kind, us in sorted(by_kind.items(), key=lambda item: -item[1])},
        kernels=kernels[:NUM_LISTED],
        **coverage(_intervals(profiler), num_rounds),
    )


def profile_end(run: Callable[[], object], round_ms: float, num_rounds: int) -> dict[str, Any]:
    """Coverage of some of the last rounds of a whole run, the very last left out.

    Args:
        run: ends with rounds that take `round_ms` each.
    Returns:
        `covered_us` and `idle` as in `GpuTime`, and `round_us`, which they are parts of.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return last_rounds(_intervals(profiler), 1e3 * round_ms, num_rounds)


def last_rounds(intervals: list[tuple[float, float, str]], round_us: float, num_rounds: int) -> dict[str, Any]:
    """See `profile_end`."""
    end = max(stop for _, stop, _ in intervals) - NUM_LAST_LEFT_OUT * round_us
    inside = [item for item in intervals if end - num_rounds * round_us <= item[0] < end]
    return {"round_us": round(round_us, 1), **coverage(inside, num_rounds)}


def _intervals(profiler: Any) -> list[tuple[float, float, str]]:
    """Start and end in microseconds and name of everything that ran on the GPU."""
    return [
        (event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3, event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]


def coverage(intervals: list[tuple[float, float, str]], num_rounds: int) -> dict[str, Any]:
    """GpuTime's `covered_us` and `idle` of kernels given by start, end and name."""
    covered, end, last = 0.0, float("-inf"), ""
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    for start, stop, name in sorted(intervals):
        if start > end and last:
            gaps[last[:60], name[:60]].append(start - end)
        covered += max(0.0, stop - max(start, end))
        if stop > end:
            end, last = stop, name
    idle = [
        {"before": before, "after": after, "times": len(us) / num_rounds, "us": round(sum(us) / num_rounds, 2)}
        for (before, after), us in gaps.items()
    ]
    idle.sort(key=lambda gap: -gap["us"])
    return {"covered_us": round(covered / num_rounds, 1), "idle": idle[:NUM_LISTED]}
