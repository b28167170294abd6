"""Does the adaptive choice of k ever lose? kimi-nano through the real Triton Server, on a CPU.

    python benchmarks/speculation_policy.py [--temperatures 0 1] [--streams 1 4 8] [--turns 12] [--json OUT]
    python benchmarks/speculation_policy.py --join CELL.json... [--json OUT]

Three servers run side by side: one without a draft, one that drafts as many tokens as each request asks for, and one
that chooses (`speculation_policy = adaptive`). For each temperature and number of streams the cases take turns over the
same requests, others in each turn, so that whatever else the machine does falls on all alike; the adaptive server's
ratio to the best other case is a median over the turns, with an interval by resampling them. All its turns count, and
it is not told of a change: it meets each new load as it comes. The JSON is written after each load. A machine of many
cores runs several loads at once, each a command of its own with its own cores (taskset) and --first-port; --join makes
one report of theirs.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_client.load import LoadResult, run_load
from serving_suite.policy_rows import MOST_DRAFT_TOKENS, measure, table, verdict
from serving_suite.side_by_side import ServedCase, add_common_options, provenance, servers_side_by_side


@dataclass(slots=True)
class Case(ServedCase):
    """One way of serving, and how many tokens it drafted."""

    verifies: list[int] = field(default_factory=lambda: [0] * (MOST_DRAFT_TOKENS + 1))
    """Counts by number of draft tokens."""

    def run(self, temperature: float, requests: range, streams: int, max_tokens: int) -> None:
        """One turn over the requests of such numbers."""
        fields = [self.request(number, temperature, max_tokens) for number in requests]
        result: LoadResult = asyncio.run(run_load(f"localhost:{self.server.ports.grpc}", fields, streams))
        if result.errors:
            raise SystemExit(f"{self.name}: {result.errors[0]}")
        self.rates.append(result.output_tokens_per_second)
        self.texts = sorted(request.completion.text for request in result.requests)
        for request in result.requests:
            for k, count in enumerate(request.completion.statistics["num_draft_tokens_histogram"]):
                self.verifies[k] += count


def server_settings(args: argparse.Namespace) -> dict[str, ServingSettings]:
    """The servers: without a draft, fixed, adaptive."""
    return {
        name: ServingSettings(
            checkpoint=str(args.checkpoint),
            draft=draft,
            device="cpu",
            max_model_len=1024,
            max_num_seqs=32,
            speculation_policy="adaptive" if name == "adaptive" else "fixed",
        )
        for name, draft in (("plain", ""), ("fixed", str(args.draft)), ("adaptive", str(args.draft)))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--turns", type=int, default=12, help="at most, of each load")
    parser.add_argument("--seconds", type=float, help="after the servers' start no further turn begins later")
    parser.add_argument("--first-port", type=int, help="the first of nine in a row; else free ones are taken")
    parser.add_argument("--join", type=Path, nargs="+", help="reports of the same command but for its loads")
    args = parser.parse_args()
    report: dict[str, Any] = {}
    for report in [joined(args.join)] if args.join else reports(args):
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report["runs"]) + "\n\n" + verdict(report["runs"]))


def reports(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The report, once more after each load."""
    report: dict[str, Any] = {**provenance(), "date": time.strftime("%Y-%m-%d %H:%M"), "runs": []}
    with servers_side_by_side(server_settings(args), args.first_port) as servers:
        started_s = time.monotonic()

        def is_over() -> bool:
            return args.seconds is not None and time.monotonic() - started_s > args.seconds

        for temperature, streams in itertools.product(args.temperatures, args.streams):
            cases = [
                Case("no draft", servers["plain"], 0),
                *(Case(f"k = {k}", servers["fixed"], k) for k in args.k),
                Case("adaptive", servers["adaptive"], MOST_DRAFT_TOKENS),
            ]
            report["runs"].append(measure(cases, temperature, streams, args, is_over))
            print(json.dumps(report["runs"][-1]), file=sys.stderr)
            yield report


def joined(paths: Sequence[Path]) -> dict[str, Any]:
    """One report of several, by temperature and streams."""
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    runs = sorted((run for part in parts for run in part["runs"]), key=lambda run: (run["temperature"], run["streams"]))
    return {**parts[0], "command": [part["command"] for part in parts], "runs": runs}


if __name__ == "__main__":
    main()
