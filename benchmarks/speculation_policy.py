"""Does the adaptive choice of k ever lose? kimi-nano through the real Triton Server, on a CPU.

    python benchmarks/speculation_policy.py [--temperatures 0 1] [--streams 1 4 8] [--repeats 5] [--json OUT]

Three servers run side by side: one without a draft, one that drafts as many tokens as each request asks for, and one
that chooses (`speculation_policy = adaptive`). For each temperature and number of streams the cases take turns in short
slices, so that whatever else the machine does falls on all alike, and medians are compared. The adaptive server is
not told of a change: it meets each new load as it comes, and its first slice, which pays for learning, is shown apart.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, stdev
from typing import Any, Protocol

from kimi_backend.config.settings import ServingSettings
from kimi_client.load import LoadResult, run_load
from serving_suite.side_by_side import (
    ServedCase,
    add_common_options,
    in_turn,
    provenance,
    servers_side_by_side,
)

BAR = 0.97
"""The adaptive server must give at least this part of the better of "no draft" and the best fixed k."""
MOST_DRAFT_TOKENS = 3


@dataclass(slots=True)
class Case(ServedCase):
    """One way of serving, and how many tokens it drafted."""

    verifies: list[int] = field(default_factory=lambda: [0] * (MOST_DRAFT_TOKENS + 1))
    """By number of draft tokens."""

    def run(self, temperature: float, streams: int, num_requests: int, max_tokens: int) -> None:
        """One slice."""
        requests = [self.request(i, temperature, max_tokens) for i in range(num_requests)]
        result: LoadResult = asyncio.run(run_load(f"localhost:{self.server.ports.grpc}", requests, streams))
        if result.errors:
            raise SystemExit(f"{self.name}: {result.errors[0]}")
        self.rates.append(result.output_tokens_per_second)
        self.texts = sorted(request.completion.text for request in result.requests)
        for request in result.requests:
            for k, count in enumerate(request.completion.statistics["num_draft_tokens_histogram"]):
                self.verifies[k] += count


class MeasuredCase(Protocol):
    """A way of serving that takes its turns."""

    name: str
    rates: list[float]
    texts: list[str]
    verifies: list[int]

    def run(self, temperature: float, streams: int, num_requests: int, max_tokens: int) -> None:
        """One slice."""
        ...


def measure(
    cases: Sequence[MeasuredCase], temperature: float, streams: int, args: argparse.Namespace
) -> dict[str, Any]:
    """The cases in turn; the first slice of each counts apart."""
    num_requests = max(2 * streams, 3)
    for repeat in range(args.repeats + 1):
        for case in in_turn(list(cases), repeat):
            case.run(temperature, streams, num_requests, args.max_tokens)
    plain, *fixed, adaptive = cases
    rates = {case.name: median(case.rates[1:]) for case in cases}
    best_fixed = max(fixed, key=lambda case: rates[case.name])
    to_plain, plain_error = ratio(adaptive, plain)
    to_fixed, fixed_error = ratio(adaptive, best_fixed)
    is_met = to_plain >= BAR and (to_fixed >= BAR or rates[plain.name] >= rates[best_fixed.name])
    return {
        "temperature": temperature,
        "streams": streams,
        "tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "best_fixed": best_fixed.name,
        "adaptive_to_plain": [to_plain, plain_error],
        "adaptive_to_best_fixed": [to_fixed, fixed_error],
        "first_slice_to_plain": round(adaptive.rates[0] / plain.rates[0], 3),
        "shares": [round(count / sum(adaptive.verifies), 3) for count in adaptive.verifies],
        "texts_equal": all(case.texts == plain.texts for case in cases),
        "meets_bar": is_met,
    }


def ratio(one: MeasuredCase, other: MeasuredCase) -> tuple[float, float]:
    """Median over the slices and its standard error. Neighbours in time are compared with each other: the machine's
    load moves both."""
    ratios = [a / b for a, b in zip(one.rates[1:], other.rates[1:], strict=True)]
    error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return round(median(ratios), 3), round(error, 3)


def server_settings(args: argparse.Namespace) -> dict[str, ServingSettings]:
    """Without a draft, fixed, adaptive."""
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


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown."""
    names = list(runs[0]["tokens_per_second"])
    head = [
        "temperature",
        "streams",
        *names,
        "adaptive / no draft",
        "adaptive / best fixed",
        "verifies with k = 0, 1, 2, 3",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for run in runs:
        rates = [f"{rate:.0f}" for rate in run["tokens_per_second"].values()]
        shares = ", ".join(f"{100 * share:.0f} %" for share in run["shares"])
        to_plain, to_fixed = (
            "{:.2f} ± {:.2f}".format(*run[name]) for name in ("adaptive_to_plain", "adaptive_to_best_fixed")
        )
        ratios = [to_plain, f"{to_fixed} ({run['best_fixed']})"]
        cells = [f"{run['temperature']:g}", str(run["streams"]), *rates, *ratios, shares]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(runs: list[dict[str, Any]]) -> str:
    """One plain sentence or two."""
    missed = [f"temperature {r['temperature']:g} x {r['streams']}" for r in runs if not r["meets_bar"]]
    differing = [f"temperature {r['temperature']:g} x {r['streams']}" for r in runs if not r["texts_equal"]]
    said = f"MISSES the bar of {BAR} at {', '.join(missed)}." if missed else f"At least {BAR} of the better of both."
    return said + (f" TEXTS DIFFER at {', '.join(differing)}." if differing else " Every text the same.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    args = parser.parse_args()
    runs = []
    with servers_side_by_side(server_settings(args)) as servers:
        for temperature in args.temperatures:
            for streams in args.streams:
                cases = [
                    Case("no draft", servers["plain"], 0),
                    *(Case(f"k = {k}", servers["fixed"], k) for k in args.k),
                    Case("adaptive", servers["adaptive"], MOST_DRAFT_TOKENS),
                ]
                runs.append(measure(cases, temperature, streams, args))
                print(json.dumps(runs[-1]), file=sys.stderr)
    print(table(runs) + "\n\n" + verdict(runs))
    if args.json:
        args.json.write_text(json.dumps({**provenance(), "runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
