"""Is the adaptive choice of k ever slower than no draft or the best fixed k? Cases in turn, and their table."""

import argparse
from collections.abc import Sequence
from statistics import median, stdev
from typing import Any, Protocol

from serving_suite.side_by_side import in_turn

BAR = 0.97
"""The adaptive server must give at least this part of the better of "no draft" and the best fixed k."""
MOST_DRAFT_TOKENS = 7


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
        "slices": {case.name: [round(rate) for rate in case.rates] for case in cases},
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


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown."""
    names = list(runs[0]["tokens_per_second"])
    head = [
        "temperature",
        "streams",
        *names,
        "adaptive / no draft",
        "adaptive / best fixed",
        "verifies with k = 0, 1, …",
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
