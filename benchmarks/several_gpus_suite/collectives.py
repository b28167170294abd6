"""Sums and gathers of a decode step, one to 512 rows, against NCCL's (gloo's on a CPU)."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from several_gpus_suite.verdict import Verdict, run_command

ALLOWED_BEYOND_LIBRARY = 1.05


def run(num_ranks: int, *, is_cpu: bool, out: Path) -> Verdict:
    """Measure them, and ask that none of ours takes longer than the library's for as many rows."""
    file, verdict = out / f"collectives-{num_ranks}.json", Verdict()
    command = ["benchmarks/collectives.py", "--ranks", str(num_ranks), "--out", str(file)]
    status = run_command([*command, "--cpu"] if is_cpu else command)
    verdict.ask(status == 0, f"every result equals the library's, with the same bits on every rank (status {status})")
    if file.exists():
        judge(json.loads(file.read_text()), verdict)
    return verdict


def judge(report: dict[str, Any], verdict: Verdict) -> None:
    """Compare the better of our ways with the library's, for each operation and number of rows."""
    times: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for row in report["results"]:
        op, _, way = row["op"].partition(", ")
        times[op, row["rows"]][way] = row["time_us"]
    for (op, rows), ways in times.items():
        library = {way: ways.pop(way) for way in ("NCCL", "gloo") if way in ways}
        (name, theirs), *_ = library.items()
        text = f"{op:7} {rows:4} rows: {name} {theirs:8.1f} us"
        if ways:
            way = min(ways, key=lambda way: ways[way])
            verdict.ask(ways[way] <= theirs * ALLOWED_BEYOND_LIBRARY, f"{text}, {way} {ways[way]:8.1f} us")
        else:
            verdict.tell(text)
