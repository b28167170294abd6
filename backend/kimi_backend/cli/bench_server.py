"""`kimi bench` against a running server: a load, a table, JSON, and a plot."""

import asyncio
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kimi_backend.cli.perf_analyzer import find_perf_analyzer, run_perf_analyzer
from kimi_backend.errors import InvalidRequestError
from kimi_client.load import LoadResult, run_load


def bench(
    url: str,
    prompts: list[dict[str, Any]],
    fields: dict[str, Any],
    *,
    concurrency: int,
    num_requests: int,
    compare_no_spec: bool,
    load_generator: str = "auto",
) -> dict[str, Any]:
    """Run the load, twice with `compare_no_spec`, and return everything measured.

    Args:
        load_generator: perf_analyzer, own, or auto: the former where it is installed.
        fields: sampling fields of every request; its `seed` is raised by one from request to request. Without one the
            server draws each request's, but for a comparison, whose two texts need the same: there it is 0.
    """
    if compare_no_spec:
        fields = {"seed": 0, **fields}
    runs = {"speculative": fields}
    if compare_no_spec:
        runs["plain"] = {**fields, "num_speculative_tokens": 0}
    program = _choose(load_generator)
    results = {}
    for name, run in runs.items():
        requests = _requests(prompts, run, num_requests)
        if program is not None:
            results[name] = run_perf_analyzer(program, url, requests, concurrency)
        else:
            results[name] = _run(url, requests, concurrency, name)
    report: dict[str, Any] = {name: result.summary() for name, result in results.items()}
    report["load_generator"] = "own" if program is None else "perf_analyzer"
    if compare_no_spec:
        texts = [[r.completion.text for r in result.requests] for result in results.values()]
        report["texts_equal"] = sorted(texts[0]) == sorted(texts[1])
        report["speedup"] = round(
            results["speculative"].output_tokens_per_second / results["plain"].output_tokens_per_second, 3
        )
    return report


def _choose(load_generator: str) -> str | None:
    """The perf_analyzer to use, or None for our own generator.

    Raises:
        InvalidRequestError: perf_analyzer is asked for and not installed, or another name is.
    """
    if load_generator not in ("auto", "perf_analyzer", "own"):
        raise InvalidRequestError(f"--load-generator: {load_generator!r} given, auto, perf_analyzer or own is allowed")
    program = None if load_generator == "own" else find_perf_analyzer()
    if program is None and load_generator == "perf_analyzer":
        raise InvalidRequestError("--load-generator: perf_analyzer is not installed; scripts/get_perf_analyzer.sh")
    return program


def _requests(prompts: list[dict[str, Any]], fields: dict[str, Any], number: int) -> list[dict[str, Any]]:
    requests = []
    for i in range(number):
        seed = {} if fields.get("seed") is None else {"seed": fields["seed"] + i}
        requests.append({**prompts[i % len(prompts)], **fields, **seed})
    return requests


def _run(url: str, requests: list[dict[str, Any]], concurrency: int, name: str) -> LoadResult:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=len(requests))
        return asyncio.run(run_load(url, requests, concurrency, lambda: progress.advance(task)))


def print_table(report: dict[str, Any]) -> None:
    """The report as a table on stderr, one column a run."""
    runs = [name for name in ("speculative", "plain") if name in report]
    table = Table(title=", ".join(["kimi bench", *report["speculative"].get("pretences", [])]))
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for key in ("output_tokens_per_second", "requests_per_second", "errors"):
        table.add_row(key, *(str(report[name][key]) for name in runs))
    for key in ("first_token_ms", "inter_token_ms", "inter_chunk_ms", "request_ms"):
        for percentile in ("p50", "p90", "p99"):
            cells = [(report[name][key] or {}).get(percentile, "-") for name in runs]
            table.add_row(f"{key} {percentile}", *map(str, cells))
    speculation = report["speculative"]["speculation"]
    if speculation:
        table.add_row("acceptance length", str(speculation["acceptance_length"]), *[""] * (len(runs) - 1))
        table.add_row("per position", str(speculation["acceptance_per_position"]), *[""] * (len(runs) - 1))
    for key, row in (("name", "speculation policy"), ("shares", "verifies with k = 0, 1, …")):
        table.add_row(row, *(str((report[name].get("policy") or {}).get(key, "-")) for name in runs))
    console = Console(stderr=True)
    console.print(table)
    if "speedup" in report:
        console.print(f"speed-up {report['speedup']}x, texts equal: {report['texts_equal']}")


def write_plot(report: dict[str, Any], path: Path) -> None:
    """Latency percentiles of each run, and acceptance per position, as a picture.

    Raises:
        InvalidRequestError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidRequestError("--plot needs matplotlib: pip install matplotlib") from None
    runs = [name for name in ("speculative", "plain") if name in report]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    keys = ("first_token_ms", "inter_token_ms", "inter_chunk_ms")
    for offset, name in enumerate(runs):
        heights = [(report[name][key] or {}).get("p50", 0) for key in keys]
        left.bar([i + 0.4 * offset for i in range(len(keys))], heights, 0.38, label=name)
    left.set_xticks([i + 0.2 * (len(runs) - 1) for i in range(len(keys))], ["first token", "a token", "a chunk"])
    left.set_ylabel("median, ms")
    left.legend()
    speculation = report["speculative"]["speculation"]
    rates = speculation["acceptance_per_position"] if speculation else []
    right.bar(range(1, len(rates) + 1), [rate or 0 for rate in rates])
    right.set_ylim(0, 1)
    right.set_xlabel("draft position")
    right.set_ylabel("accepted / proposed")
    figure.savefig(path, dpi=120)
