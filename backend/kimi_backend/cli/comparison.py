"""Two ways of doing the same work, measured in turns, and a verdict that a busy machine cannot turn around.

A single run of each says little: whatever else the machine does falls on one of them. So both run in pairs, one right
behind the other, in turns first; each pair gives a ratio, and the median of the ratios stands with an interval that
holds it with 99 % whatever the distribution (order statistics: the sign test turned around).
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

MIN_PAIRS = 8
"""The fewest for which the smallest and the largest ratio are an interval of 99 %."""
MAX_PAIRS = 32
CONFIDENCE = 0.99
SAME_WITHIN = 0.05

Measure = Callable[[str], float]
"""measure(side) does the work once and returns its speed, for example in tokens a second."""


class Verdict(str, Enum):
    """The meaning of the ratio's interval for speculation."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "the same"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and an interval around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g} to {self.high:.4g})"

    def as_json(self) -> dict[str, float]:
        return {"median": round(self.median, 4), "low": round(self.low, 4), "high": round(self.high, 4)}


def spread(values: Sequence[float]) -> Spread:
    """The median, and the narrowest pair of ordered values that holds the true one with 99 %, or all of them if few."""
    ordered = sorted(values)
    outside = _num_outside(len(ordered))
    return Spread(statistics.median(ordered), ordered[outside], ordered[-1 - outside])


def _num_outside(number: int) -> int:
    """The number of values that may lie beyond each end of the interval: the sign test's critical value."""
    tail, outside = 0.5**number, 0
    while outside + 1 < number / 2:
        tail += math.comb(number, outside + 1) * 0.5**number
        if 2 * tail > 1 - CONFIDENCE:
            break
        outside += 1
    return outside


@dataclass(frozen=True, slots=True)
class Comparison:
    """Speeds of both sides, pair by pair."""

    speculative: tuple[float, ...]
    plain: tuple[float, ...]

    @property
    def speedup(self) -> Spread:
        """speculative / plain, within a pair."""
        return spread([a / b for a, b in zip(self.speculative, self.plain, strict=True)])

    @property
    def verdict(self) -> Verdict:
        ratio = self.speedup
        if len(self.plain) < MIN_PAIRS:
            return Verdict.UNDECIDED
        if ratio.low >= 1 - SAME_WITHIN and ratio.high <= 1 + SAME_WITHIN:
            return Verdict.SAME
        if ratio.low > 1:
            return Verdict.FASTER
        return Verdict.SLOWER if ratio.high < 1 else Verdict.UNDECIDED

    def sentence(self) -> str:
        """The verdict for a reader."""
        ratio, pairs = self.speedup, len(self.plain)
        measured = f"{ratio.median:.2f} x, {ratio.low:.2f} to {ratio.high:.2f} in {pairs} pairs"
        if self.verdict is Verdict.UNDECIDED:
            if pairs < MIN_PAIRS:
                return f"undecided: {measured}, and fewer than {MIN_PAIRS} say nothing"
            return f"undecided: the difference is smaller than this machine's noise ({measured})"
        if self.verdict is Verdict.SAME:
            return f"speculation is as fast as none, within {SAME_WITHIN:.0%} ({measured})"
        return f"speculation is {self.verdict.value} than none ({measured})"

    def as_json(self) -> dict[str, Any]:
        """Speed-up, its interval, the verdict, and the speeds of both sides."""
        return {
            "verdict": self.verdict.value,
            "sentence": self.sentence(),
            "speedup": self.speedup.as_json(),
            "pairs": len(self.plain),
            "tokens_per_second": {
                "speculative": spread(self.speculative).as_json(),
                "plain": spread(self.plain).as_json(),
            },
        }


def compare(
    measure: Measure,
    *,
    min_pairs: int = MIN_PAIRS,
    limit_s: float,
    on_pair: Callable[[Comparison], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Measure both sides in turns until the verdict stands.

    Args:
        measure: called with "speculative" and "plain"; both have been warmed up.
        min_pairs: at least so many pairs; with fewer than MIN_PAIRS there is no verdict.
        limit_s: no pair beyond `min_pairs` begins later than this.
        on_pair: called with what is known after each pair.
    """
    start = clock()
    speeds: dict[str, list[float]] = {"speculative": [], "plain": []}
    while True:
        turn = list(speeds)
        for side in turn if len(speeds["plain"]) % 2 == 0 else reversed(turn):
            speeds[side].append(measure(side))
        result = Comparison(tuple(speeds["speculative"]), tuple(speeds["plain"]))
        on_pair(result)
        pairs = len(result.plain)
        if pairs < min_pairs:
            continue
        is_decided = result.verdict is not Verdict.UNDECIDED
        if is_decided or pairs < MIN_PAIRS or pairs >= MAX_PAIRS or clock() - start > limit_s:
            return result
