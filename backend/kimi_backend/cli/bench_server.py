"""`kimi bench` against a running server: a load, a table, JSON, and a plot."""

import asyncio
import json
import uuid
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kimi_backend.cli.acceptance import acceptance_kind
from kimi_backend.cli.comparison import MIN_PAIRS, compare, spread
from kimi_backend.cli.cost_report import costs_report, print_costs
from kimi_backend.cli.perf_analyzer import find_perf_analyzer, run_perf_analyzer
from kimi_backend.errors import InvalidRequestError, KimiError
from kimi_backend.types.step_costs import StepCosts
from kimi_client import KimiClient
from kimi_client.load import LoadResult, join_results, run_load


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """The load of a run."""

    url: str
    prompts: list[dict[str, Any]]
    fields: dict[str, Any]
    """Sampling fields of every request; its `seed` is raised by one from request to request."""
    concurrency: int
    num_requests: int
    load_generator: str = "auto"
    """perf_analyzer, own, or auto: the former where it is installed."""

    def requests(self, number: int, **more: Any) -> list[dict[str, Any]]:
        fields = self.fields | more
        seed = fields.get("seed")
        seeds = ({} if seed is None else {"seed": seed + i} for i in range(number))
        return [{**self.prompts[i % len(self.prompts)], **fields, **each} for i, each in enumerate(seeds)]


class LoadRunner:
    """Runs a load again and again, and keeps what each run measured."""

    def __init__(self, load: ServerLoad, progress: Progress, *, is_shown: bool = True) -> None:
        self._load, self._progress = load, progress
        self._program = _choose(load.load_generator)
        self._task = progress.add_task("", visible=is_shown)
        self.results: dict[str, list[LoadResult]] = {}
        self.texts: list[list[str]] = []

    @property
    def load_generator(self) -> str:
        return "own" if self._program is None else "perf_analyzer"

    def warm_up(self, name: str) -> None:
        """A short load like the one to come, which is not kept."""
        self._send(name, self._load.requests(self._load.concurrency, **_side(name)), "warming up")

    def run(self, name: str) -> float:
        """The load once; its output tokens a second.

        Each run has a cache salt of its own: it finds prompts of its own requests in the cache, and no earlier run's.
        """
        kept = self.results.setdefault(name, [])
        requests = self._load.requests(self._load.num_requests, cache_salt=uuid.uuid4().hex, **_side(name))
        kept.append(self._send(name, requests, f"run {len(kept) + 1}"))
        self.texts.append(sorted(request.completion.text for request in kept[-1].requests))
        if not kept[-1].requests:
            raise KimiError(f"no request of the load came to its end: {kept[-1].errors[0]}")
        return kept[-1].output_tokens_per_second

    def summary(self, name: str) -> dict[str, Any]:
        """All runs of a side: percentiles over their requests together, the median speed of a run."""
        results = self.results[name]
        speeds = spread([result.output_tokens_per_second for result in results])
        summary = join_results(results).summary()
        return {
            **summary,
            "acceptance": acceptance_kind(summary.get("pretences", ())),
            "runs": len(results),
            "output_tokens_per_second": round(speeds.median, 2),
            "output_tokens_per_second_range": [round(speeds.low, 2), round(speeds.high, 2)],
        }

    def _send(self, name: str, requests: list[dict[str, Any]], what: str) -> LoadResult:
        load = self._load
        self._progress.reset(self._task, total=len(requests), description=f"{name}, {what}")
        if self._program is not None:
            result = run_perf_analyzer(self._program, load.url, requests, min(load.concurrency, len(requests)))
            self._progress.advance(self._task, len(requests))
            return result
        advance = partial(self._progress.advance, self._task)
        return asyncio.run(run_load(load.url, requests, load.concurrency, advance))


def _side(name: str) -> dict[str, Any]:
    return {"num_speculative_tokens": 0} if name == "plain" else {}


def bench(load: ServerLoad, *, compare_no_spec: bool, repeats: int | None, limit_s: float) -> dict[str, Any]:
    """Warm up, run the load, in comparisons in turns with speculation and without, and return everything measured.

    Args:
        repeats: runs of each side, at least; None: one, or in comparisons as many as a verdict needs.
        limit_s: no run beyond those begins later.
    """
    if compare_no_spec and load.fields.get("seed") is None:
        load = replace(load, fields=load.fields | {"seed": 0})  # both texts need the same seeds
    sides = ("speculative", "plain") if compare_no_spec else ("speculative",)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        runner = LoadRunner(load, progress)
        for name in sides:
            runner.warm_up(name)
        if not compare_no_spec:
            for _ in range(repeats or 1):
                runner.run("speculative")
            return {"speculative": runner.summary("speculative"), **_about(load, runner)}
        comparison = compare(runner.run, min_pairs=repeats or MIN_PAIRS, limit_s=limit_s)
    return {
        **{name: runner.summary(name) for name in sides},
        **_about(load, runner),
        "texts_equal": all(texts == runner.texts[0] for texts in runner.texts),
        "comparison": comparison.as_json(),
    }


def _about(load: ServerLoad, runner: LoadRunner) -> dict[str, Any]:
    """The load generator, and the costs that the server chooses k by."""
    return {"load_generator": runner.load_generator, "step_costs": _served_costs(load.url)}


def _served_costs(url: str) -> dict[str, Any] | None:
    """The costs that a server chooses k by; None where it does not."""
    with KimiClient(url) as client:
        done = client.generate(text_input="1", max_tokens=1, return_step_costs=True)
    given = done.statistics.get("step_costs", {})
    costs = {name: StepCosts.from_json(json.dumps(values)) for name, values in given.items()}
    return costs_report(costs, "the server's machine")


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


def print_table(report: dict[str, Any]) -> None:
    """The report as a table on stderr, one column a run."""
    runs = [name for name in ("speculative", "plain") if name in report]
    speculative = report["speculative"]
    synthetic_parts = speculative.get("pretences", [])
    table = Table(title=", ".join(["kimi bench", f"acceptance {speculative['acceptance']}", *synthetic_parts]))
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for key in ("runs", "output_tokens_per_second", "output_tokens_per_second_range", "errors"):
        label = "  interval" if key.endswith("_range") else key
        table.add_row(label, *(_shown(report[name][key]) for name in runs))
    for key in ("first_token_ms", "inter_token_ms", "inter_chunk_ms", "request_ms"):
        for percentile in ("p50", "p90", "p99"):
            cells = [(report[name][key] or {}).get(percentile, "-") for name in runs]
            table.add_row(f"{key} {percentile}", *map(str, cells))
    speculation = report["speculative"]["speculation"]
    if speculation:
        table.add_row("acceptance length", str(speculation["acceptance_length"]), *[""] * (len(runs) - 1))
        table.add_row("per position", str(speculation["acceptance_per_position"]), *[""] * (len(runs) - 1))
    for proposer, rounds in (speculative.get("speculation_by_proposer") or {}).items():
        said = f"{rounds['rounds']} rounds, length {rounds['acceptance_length']}"
        table.add_row(f"  {proposer}", said, *[""] * (len(runs) - 1))
    for key, row in (("name", "speculation policy"), ("shares", "verifies with k = 0, 1, …")):
        table.add_row(row, *(str((report[name].get("policy") or {}).get(key, "-")) for name in runs))
    console = Console(stderr=True)
    console.print(table)
    if "comparison" in report:
        console.print(f"{report['comparison']['sentence']}; texts equal: {report['texts_equal']}")
    if report["step_costs"] is not None:
        print_costs(console, report["step_costs"])


def _shown(value: Any) -> str:
    return " to ".join(map(str, value)) if isinstance(value, list) else str(value)


def write_plot(report: dict[str, Any], path: Path) -> None:
    """Latency percentiles of each run, and acceptance per position, as a picture.

    Raises:
        InvalidRequestError: matplotlib is not installed.
    """
    from kimi_backend.cli.plots import new_figure

    runs = [name for name in ("speculative", "plain") if name in report]
    figure = new_figure(figsize=(9, 3.5))
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
