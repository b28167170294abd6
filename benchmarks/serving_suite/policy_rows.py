"""Is the adaptive choice of k ever slower than no draft or the best fixed k? Cases in turn, and their table.

Each turn has prompts and seeds of its own, the same for every case, so a case's texts and tokens are those of every
other and a ratio of two rates is one of times. What is behind another one by far after some turns has no more of them:
the turns that are left tell the near ones apart.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

import numpy as np

from serving_suite.side_by_side import in_turn

BAR = 0.97
"""The adaptive server must give at least this part of the better of "no draft" and the best fixed k."""
MOST_DRAFT_TOKENS = 7
JUDGED_TURNS, FAR_BEHIND = 3, 0.92
"""A case whose rate after so many turns is below this part of the best one's has no more of them."""
RESAMPLED = 4_000
REST_S = 0.5
"""The pause before each turn. Threads of the server that has just had one spin for some tenths of a second, which took
a tenth of the next server's rate, and nothing of a case's on the same server."""


class Timed(Protocol):
    """A way of serving that took its turns."""

    name: str
    rates: list[float]
    """One entry a turn."""


class MeasuredCase(Timed, Protocol):
    """A way of serving that takes its turns."""

    texts: list[str]
    verifies: list[int]

    def run(self, temperature: float, requests: range, streams: int, max_tokens: int) -> None:
        """One turn over the requests of such numbers."""
        ...


def measure(
    cases: Sequence[MeasuredCase],
    temperature: float,
    streams: int,
    args: argparse.Namespace,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The cases in turn, from the first request on.

    Args:
        is_over: asked before each turn, once one has been without those that are far behind.
    """
    *others, adaptive = cases
    running, differing = list(others), set[int]()
    num_requests = 2 * streams
    for turn in range(args.turns):
        if turn > JUDGED_TURNS and is_over():
            break
        for case in in_turn([*running, adaptive], turn):
            time.sleep(REST_S)
            case.run(temperature, range(turn * num_requests, (turn + 1) * num_requests), streams, args.max_tokens)
        if any(case.texts != adaptive.texts for case in running):
            differing.add(turn)
        if turn + 1 == JUDGED_TURNS:
            rates = [median(case.rates) for case in running]
            running = [case for case, rate in zip(running, rates, strict=True) if rate >= FAR_BEHIND * max(rates)]
    return {
        "temperature": temperature,
        "streams": streams,
        "tokens_per_second": {case.name: round(median(case.rates), 1) for case in cases},
        "turns": {case.name: [round(rate, 1) for rate in case.rates] for case in cases},
        "to_no_draft": round(median(paired(adaptive, others[0])), 3),
        **against_best(others, adaptive),
        "shares": [round(count / max(sum(adaptive.verifies), 1), 3) for count in adaptive.verifies],
        "texts_equal": not differing,
    }


def against_best(others: Sequence[Timed], case: Timed) -> dict[str, Any]:
    """The best of the others, and the case's ratio to it: median, interval, in the first turn, and by the bar. A single
    turn has no spread, so it is sure of nothing."""
    best, ratios = of_best(others, case)
    low, high = interval(ratios)
    return {
        "best": best,
        "to_best": [round(median(ratios), 3), low, high],
        "first_turn_to_best": round(ratios[0], 3),
        "meets_bar": median(ratios) >= BAR,
        "misses_bar_for_sure": len(ratios) > 1 and high < BAR,
    }


def of_best(others: Sequence[Timed], case: Timed) -> tuple[list[str], list[float]]:
    """Names of the best other case by the odd and by the even turns, and the case's ratio to it in each turn.

    The best by the even turns is the peer in the odd ones, and the other way round: the best of many by one measurement
    owes some of its lead in it to chance. A single turn has no other.
    """
    lasting = [other for other in others if len(other.rates) == len(case.rates)]
    best = [max(lasting, key=lambda other: median(other.rates[1 - odd :: 2] or other.rates)) for odd in (0, 1)]
    ratios = [rate / best[turn % 2].rates[turn] for turn, rate in enumerate(case.rates)]
    return sorted({other.name for other in best}), ratios


def paired(one: Timed, other: Timed) -> list[float]:
    """Ratios by turn, as long as both took part."""
    return [a / b for a, b in zip(one.rates, other.rates, strict=False)]


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The limits of 95 % of the medians of as many ratios that are drawn from them."""
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLED, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5)).tolist()
    return round(low, 3), round(high, 3)


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown."""
    names = list(runs[0]["tokens_per_second"])
    head = ["temperature", "streams", *names, "turns", "/ no draft", "/ best (95 %)", "verifies with k = 0, 1, …"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for run in runs:
        rates = [f"{rate:.0f}" for rate in run["tokens_per_second"].values()]
        shares = ", ".join(f"{100 * share:.0f} %" for share in run["shares"])
        to_best = "{:.3f} ({:.3f} to {:.3f})".format(*run["to_best"]) + f" of {' / '.join(run['best'])}"
        num_turns = str(len(run["turns"]["adaptive"]))
        cells = [f"{run['temperature']:g}", str(run["streams"]), *rates, num_turns, f"{run['to_no_draft']:.2f}"]
        lines.append("| " + " | ".join([*cells, to_best, shares]) + " |")
    return "\n".join(lines)


def name_of(run: dict[str, Any]) -> str:
    return f"temperature {run['temperature']:g} x {run['streams']}"


def verdict(runs: Sequence[dict[str, Any]], name: Callable[[dict[str, Any]], str] = name_of) -> str:
    """One plain sentence or two.

    Args:
        name: what a run is called.
    """
    missed, differing = [r for r in runs if not r["meets_bar"]], [r for r in runs if not r["texts_equal"]]
    sure = [r for r in missed if r["misses_bar_for_sure"]]
    said = f"At least {BAR} of the better of both."
    if missed:
        said = f"MISSES the bar of {BAR} at {_named(missed, name)}"
        said += f"; beyond chance at {_named(sure, name)}." if sure else "; nowhere beyond chance."
    return said + (f" TEXTS DIFFER at {_named(differing, name)}." if differing else " Every text the same.")


def _named(runs: Sequence[dict[str, Any]], name: Callable[[dict[str, Any]], str]) -> str:
    return ", ".join(name(run) for run in runs)
