"""`kimi bench --sweep-k … --sweep-streams …`: tokens a second for each number of draft tokens and of streams."""

import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kimi_backend.cli.bench_server import LoadRunner, ServerLoad
from kimi_backend.errors import InvalidRequestError

REPEATS = 3


def parse_numbers(option: str, text: str, lowest: int, highest: int) -> list[int]:
    """Numbers with commas between them.

    Raises:
        InvalidRequestError: what is given is none.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(lowest <= number <= highest for number in numbers):
        raise InvalidRequestError(
            f"{option}: {text!r} given, numbers from {lowest} to {highest} with commas between are allowed"
        )
    return sorted(set(numbers))


def sweep(load: ServerLoad, ks: list[int], streams: list[int], repeats: int | None) -> dict[str, Any]:
    """Run the load in every combination, `repeats` times, in another order each time."""
    cells = [(k, number) for number in streams for k in ks]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        whole = progress.add_task("sweep", total=len(cells) * (repeats or REPEATS))
        runners = {}
        for k, number in cells:
            fields = load.fields | {"num_speculative_tokens": k}
            own = replace(load, fields=fields, concurrency=number, num_requests=max(load.num_requests, 2 * number))
            runners[k, number] = LoadRunner(own, progress, is_shown=False)
            runners[k, number].warm_up("speculative")
        for turn in range(repeats or REPEATS):
            for cell in random.Random(turn).sample(cells, len(cells)):
                runners[cell].run("speculative")
                progress.advance(whole)
    rows = [{"k": k, "streams": number, **runners[k, number].summary("speculative")} for k, number in cells]
    return {
        "acceptance": rows[0]["acceptance"],
        "load_generator": next(iter(runners.values())).load_generator,
        "rows": rows,
        "best_k": {str(number): _best(rows, number) for number in streams},
    }


def _best(rows: list[dict[str, Any]], streams: int) -> int:
    best: int = max((r for r in rows if r["streams"] == streams), key=lambda r: r["output_tokens_per_second"])["k"]
    return best


def print_sweep_table(report: dict[str, Any]) -> None:
    """Tokens a second on stderr, a row a number of streams, a column a k."""
    rows = {(row["k"], row["streams"]): row for row in report["rows"]}
    ks = sorted({k for k, _ in rows})
    table = Table(title=f"kimi bench, output tokens/s (range), acceptance {report['acceptance']}")
    table.add_column("streams", justify="right")
    for k in ks:
        table.add_column(f"k = {k}", justify="right")
    for streams in sorted({number for _, number in rows}):
        cells = []
        for k in ks:
            row = rows[k, streams]
            low, high = row["output_tokens_per_second_range"]
            cells.append(f"{row['output_tokens_per_second']:.0f} ({low:.0f} to {high:.0f})")
        table.add_row(str(streams), *cells)
    console = Console(stderr=True)
    console.print(table)
    lengths = {k: [row["speculation"]["acceptance_length"] for row in report["rows"] if _drafts(row, k)] for k in ks}
    shown = ", ".join(f"{k}: {statistics.mean(each):.2f}" for k, each in lengths.items() if each)
    console.print(f"acceptance length by k: {shown or 'no speculation'}")


def _drafts(row: dict[str, Any], k: int) -> bool:
    return row["k"] == k and row["speculation"] is not None


def write_sweep_plot(report: dict[str, Any], path: Path) -> None:
    """Tokens a second over k, a line a number of streams, with the range of the runs.

    Raises:
        InvalidRequestError: matplotlib is not installed.
    """
    from kimi_backend.cli.plots import new_figure

    figure = new_figure(figsize=(6, 4))
    axes = figure.subplots()
    for streams in sorted({row["streams"] for row in report["rows"]}):
        rows = [row for row in report["rows"] if row["streams"] == streams]
        middle = [row["output_tokens_per_second"] for row in rows]
        ranges = [row["output_tokens_per_second_range"] for row in rows]
        below = [m - low for m, (low, _) in zip(middle, ranges, strict=True)]
        above = [high - m for m, (_, high) in zip(middle, ranges, strict=True)]
        axes.errorbar([row["k"] for row in rows], middle, yerr=[below, above], capsize=3, label=f"{streams} streams")
    axes.set_xticks(sorted({row["k"] for row in report["rows"]}))
    axes.set_xlabel("draft tokens a round")
    axes.set_ylabel("output tokens/s")
    axes.set_ylim(bottom=0)
    axes.set_title(f"acceptance {report['acceptance']}")
    axes.legend()
    figure.savefig(path, dpi=120)
