"""Measure every op of the Triton-language kernel set against the hardware's floor.

    PYTHONPATH=kernels:backend python benchmarks/kernels.py --out results [--only mla_decode] [--compare old.json]

For each case of `kernel_cases`: outputs are checked, all calls (inputs rotate over 420 MB and more) go into one CUDA
graph, the graph is replayed, and the median of at least 50 replays over the number of calls is reported next to the
floor, computed from the read bandwidth and matrix rate of this very run.
"""

import argparse
import importlib
import json
import pkgutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import kernel_cases
from kernel_cases import Case, Ceilings
from kernel_cases.ceilings import discard_reason, measure_ceilings
from kimi_kernels import KernelSet

NUM_REPLAYS = 50
MAX_SECONDS_A_CASE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of the table; times in microseconds."""

    op: str
    name: str
    floor_us: float
    time_us: float
    spread_us: float
    """Half the distance between the 10th and 90th percentile of the replays."""
    limited_by: str
    error: float
    promise: str
    peer: str
    failure: str = ""

    @property
    def of_floor(self) -> float:
        return self.time_us / self.floor_us if self.floor_us else 0.0


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    ceilings = measure_ceilings()
    card = torch.cuda.get_device_name()
    print(describe(card, ceilings))
    results: list[Result] = []
    for case in find_cases(options.only, options.match):
        results.append(run_case(case, ceilings))
        print(format_row(results[-1]), flush=True)
        # A run that is cut off leaves what it has measured.
        save(make_report(card, ceilings, None, results), options.out)
    after = measure_ceilings()
    print(describe(card, after))
    report = make_report(card, ceilings, after, results)
    if report["discarded"]:
        print(f"DISCARD THIS RUN: {report['discarded']}")
    save(report, options.out)
    if options.compare:
        print_comparison(report, json.loads(options.compare.read_text()))
    if options.out:
        plot(results, options.out / "kernels.png", f"{card}, {report['date']}")


def make_report(card: str, ceilings: Ceilings, after: Ceilings | None, results: list[Result]) -> dict[str, object]:
    """Make what `--out` keeps and `--compare` reads; `after` is None until the run has ended."""
    reason = discard_reason(card, ceilings)
    reason = reason or (discard_reason(card, after) if after else "the run did not end")
    return {
        "card": card,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
        "discarded": reason,
        "ceilings": asdict(ceilings),
        "ceilings_after": asdict(after) if after else None,
        "results": [asdict(result) for result in results],
    }


def save(report: dict[str, object], folder: Path | None) -> None:
    """Write kernels.json, if there is a folder for it."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernels.json").write_text(json.dumps(report, indent=1))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", help="ops to run, comma-separated; all if not given")
    parser.add_argument("--match", help="run only cases whose name contains this")
    parser.add_argument("--compare", type=Path, help="kernels.json of an earlier run")
    parser.add_argument("--out", type=Path, help="folder for kernels.json and kernels.png")
    return parser.parse_args()


def find_cases(only: str | None, match: str | None) -> list[Case]:
    """The cases of every module in `kernel_cases` that has a function `cases`."""
    kernels = KernelSet.triton()
    wanted = set(only.split(",")) if only else None
    found: list[Case] = []
    for module_info in pkgutil.iter_modules(kernel_cases.__path__):
        module = importlib.import_module(f"kernel_cases.{module_info.name}")
        if hasattr(module, "cases"):
            found += [case for case in module.cases(kernels) if wanted is None or case.op in wanted]
    return [case for case in found if match is None or match in case.name]


def run_case(case: Case, ceilings: Ceilings) -> Result:
    """Prepare, check and time one case; an exception becomes the row's `failure`, so that the others still run."""
    time_us = spread_us = error = 0.0
    failure = ""
    try:
        prepared = case.prepare()
        error = prepared.check()
        time_us, spread_us = time_calls(prepared.calls)
        del prepared
    except Exception as problem:  # a broken case must not hide the rest of the table
        failure = f"{type(problem).__name__}: {str(problem).splitlines()[0][:160] if str(problem) else ''}"
    floor_us = case.floor_us(ceilings)
    return Result(
        op=case.op,
        name=case.name,
        floor_us=floor_us,
        time_us=time_us,
        spread_us=spread_us,
        limited_by=case.limited_by(ceilings),
        error=error,
        promise=verdict(case, time_us, floor_us),
        peer=case.peer,
        failure=failure,
    )


def time_calls(calls: list[Callable[[], object]]) -> tuple[float, float]:
    """Median microseconds a call over graph replays, and half their 10-90 % spread."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < NUM_REPLAYS or time.perf_counter() - started < 0.05:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
        if time.perf_counter() - started > MAX_SECONDS_A_CASE and len(times) >= 10:
            break
    times.sort()
    spread = (times[len(times) * 9 // 10] - times[len(times) // 10]) / 2
    return statistics.median(times), spread


def verdict(case: Case, time_us: float, floor_us: float) -> str:
    """Say what the case promises and whether it held."""
    limits = []
    if case.limit_us is not None:
        limits.append(case.limit_us)
    if case.limit_of_floor is not None:
        limits.append(case.limit_of_floor * floor_us)
    if not limits or not time_us:
        return ""
    return f"{'kept' if time_us <= min(limits) else 'BROKEN'} (<= {min(limits):.1f})"


def describe(card: str, ceilings: Ceilings) -> str:
    return (
        f"{card}: read {ceilings.read_bytes_per_us / 1e3:.0f} GB/s, "
        f"bf16 matmul {ceilings.matmul_flops_per_us / 1e6:.0f} TFLOP/s"
    )


def format_row(result: Result) -> str:
    head = f"{result.op:16} {result.name:34} "
    if result.failure:
        return head + "FAILED " + result.failure
    return head + (
        f"floor {result.floor_us:8.1f}{result.limited_by[0].upper()} time {result.time_us:8.1f} +- "
        f"{result.spread_us:5.1f} = {result.of_floor:5.2f}x  err {result.error:.1e}  {result.promise:18} {result.peer}"
    )


def print_comparison(report: dict[str, object], earlier: dict[str, object]) -> None:
    """Time and share of the floor of every case that both runs have."""
    print(f"compared with {earlier['card']} of {earlier['date']} ({earlier['command']})")
    old = {(row["op"], row["name"]): row for row in earlier["results"]}  # type: ignore[attr-defined]
    for row in report["results"]:  # type: ignore[attr-defined]
        before = old.get((row["op"], row["name"]))
        if before and before["time_us"] and row["time_us"]:
            change = row["time_us"] / before["time_us"] - 1
            print(
                f"{row['op']:16} {row['name']:34} {before['time_us']:9.1f} -> {row['time_us']:9.1f} us {change:+7.1%}"
            )


def plot(results: list[Result], path: Path, title: str) -> None:
    """Share of the floor reached by every case, one bar each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [result for result in results if result.time_us]
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.22 * len(measured)))
    names = [f"{result.op} {result.name}" for result in measured]
    shares = [100 * result.floor_us / result.time_us for result in measured]
    axes.barh(names, shares, color=["#7a5195" if r.limited_by == "compute" else "#2f8f83" for r in measured])
    axes.invert_yaxis()
    axes.set(xlabel="floor / time, % (green: memory, purple: compute)", xlim=(0, 105), title=title)
    axes.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
