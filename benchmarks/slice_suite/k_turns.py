"""Ways to choose k that take turns, each as long as any other, and what is said of them.

Tokens are those that the chances give on the average, for what was drafted: luck of a few hundred rounds would hide
what is looked for.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS
from kimi_kernels.synthetic_sets import chances_of
from slice_suite.recording import Round

CHANCES = (0.85, 0.67, 0.48)
"""Chances of draft tokens 1, 2, 3 where those before were accepted; each later one is `synthetic_sets.LATER_SHARE` of
the one before."""
MOST_OFF, MOST_OFF_IN_NOISE, LEAST_OF_BEST, LEAST_OF_PLAIN = 0.03, 0.05, 0.97, 0.98


@dataclass(slots=True)
class Turn:
    """One run."""

    rounds: list[Round]
    """Those in which the whole batch decodes, in order."""
    card: dict[str, Any] = field(default_factory=dict)
    """See `CardWatch.between`; of the run's last two thirds."""
    factors: Sequence[float] = ()
    """The factors that the policy has learned."""

    @property
    def later(self) -> list[Round]:
        """The last two thirds."""
        return self.rounds[len(self.rounds) // 3 :]

    @property
    def round_ms(self) -> float:
        """The mean of the last two thirds."""
        return mean_ms(self.later)

    @property
    def host_ms(self) -> float:
        """The time from the target's reply to the end of its next launch; below 0 where that is behind the one before
        it."""
        later = self.later
        behind = [after.target_launched_s - item.target_end_s for item, after in itertools.pairwise(later)]
        return 1e3 * statistics.median(behind)


def mean_ms(rounds: Sequence[Round]) -> float:
    """The mean time of rounds one behind another."""
    return 1e3 * (rounds[-1].target_end_s - rounds[0].target_end_s) / (len(rounds) - 1)


def tokens_per_s(rounds: Sequence[Round], chances: Sequence[float]) -> float:
    """Tokens a second of rounds one behind another, with as many as such draft tokens give on the average."""
    by_k = [emitted(chances, k) for k in range(MAX_SPECULATIVE_TOKENS + 1)]
    num_tokens = sum(by_k[k] for item in rounds[1:] for k in item.num_draft_tokens)
    return num_tokens / (rounds[-1].target_end_s - rounds[0].target_end_s)


def predicted(batch: int, k: int, turns: Sequence[Turn], predicted_ms: float) -> dict[str, Any]:
    """The table's prediction beside the turns of one k."""
    whole_ms = [turn.round_ms for turn in turns]
    mean = statistics.mean(whole_ms)
    return {
        "batch": batch,
        "k": k,
        "round_ms": round(mean, 4),
        "turns_ms": [round(value, 4) for value in whole_ms],
        "host_ms": round(statistics.mean(turn.host_ms for turn in turns), 4),
        "card": [turn.card for turn in turns],
        "predicted_ms": round(predicted_ms, 4),
        "off": round(predicted_ms / mean - 1, 4),
        "spread": round(max(whole_ms) / min(whole_ms) - 1, 4),
    }


def compared(batch: int, length: float, fixed: dict[int, list[Turn]], adaptive: list[Turn]) -> dict[str, Any]:
    """The policy beside each fixed k: whole runs, turn by turn."""
    chances = scaled_chances(length)
    rates = {k: [tokens_per_s(turn.rounds, chances) for turn in turns] for k, turns in fixed.items()}
    own = [tokens_per_s(turn.rounds, chances) for turn in adaptive]
    best = max(rates, key=lambda k: statistics.mean(rates[k]))
    of_best, of_plain = (
        [one / other for one, other in zip(own, rates[k], strict=True)] if k in rates else [] for k in (best, 0)
    )
    rows = [item.num_rows / batch - 1 for turn in adaptive for item in turn.rounds]
    return {
        "length": length,
        "batch": batch,
        "fixed": {k: round(statistics.mean(of_k)) for k, of_k in rates.items()},
        "best_k": best,
        "adaptive": round(statistics.mean(own)),
        "mean_k": round(statistics.mean(rows), 2),
        "factors": [turn.factors for turn in adaptive],
        "slow_rounds": [slow_rounds(turn.rounds) for turn in adaptive],
        "card": [turn.card for turn in adaptive],
        "of_best_by_turn": [round(value, 3) for value in of_best],
        "of_best": round(statistics.mean(of_best), 3),
        "of_plain": round(statistics.mean(of_plain), 3) if of_plain else None,
        "trace": [trace(turn.rounds) for turn in adaptive],
    }


def trace(rounds: Sequence[Round]) -> list[list[Any]]:
    """[rounds, milliseconds of each on the average, {draft tokens: sequences}] of twenty rounds each, one line of what
    was chosen."""
    found = []
    for start in range(0, len(rounds) - 1, 20):
        part = rounds[start : start + 21]
        if len(part) > 1:
            counts = Counter(k for item in part[1:] for k in item.num_draft_tokens)
            found.append([len(part) - 1, round(mean_ms(part), 3), dict(sorted(counts.items()))])
    return found


def slow_rounds(rounds: Sequence[Round]) -> float:
    """The share of the time that rounds of more than 1.5 times the median take beyond that."""
    seconds = np.diff([item.target_end_s for item in rounds])
    late = np.maximum(seconds - 1.5 * np.median(seconds), 0).sum()
    return round(float(late / seconds.sum()), 4)


def scaled_chances(length: float) -> tuple[float, ...]:
    """`CHANCES` times what lets k = 3 emit so many tokens a round; none above 1."""
    low, high = 0.0, 3.0
    for _ in range(60):
        scale = (low + high) / 2
        chances = [min(scale * chance, 1.0) for chance in CHANCES]
        low, high = (scale, high) if emitted(chances, len(CHANCES)) < length else (low, scale)
    return tuple(min(scale * chance, 1.0) for chance in CHANCES)


def emitted(chances: Sequence[float], k: int) -> float:
    """Tokens that a round of k draft tokens emits on the average."""
    return 1 + float(np.cumprod(chances_of(chances)[0].tolist()[:k]).sum())


def verdict(document: dict[str, Any]) -> str:
    """A text of what is missed, and the worst of each."""
    lines = []
    for name, result in document["drafts"].items():
        wrong = [item for item in result["rounds"] if not abs(item["off"]) <= most_off(item)]
        slow = [run for run in result["adaptive"] if run["of_best"] < LEAST_OF_BEST]
        losing = [run for run in result["adaptive"] if (run["of_plain"] or 1) < LEAST_OF_PLAIN]
        off = max((abs(item["off"]) for item in result["rounds"]), default=0)
        least = min((run["of_best"] for run in result["adaptive"]), default=1)
        num_rounds, num_runs = len(result["rounds"]), len(result["adaptive"])
        lines += [
            f"{name}: {len(wrong)} of {num_rounds} predictions are off by more than {MOST_OFF:.0%}, or "
            f"{MOST_OFF_IN_NOISE:.0%} where turns differ by more than {MOST_OFF:.0%} (worst {off:.1%});",
            f"  {len(slow)} of {num_runs} adaptive runs are below {LEAST_OF_BEST} of the best k (worst {least});",
            f"  {len(losing)} are below {LEAST_OF_PLAIN} of k = 0.",
        ]
        lines += [f"  off: B={item['batch']} k={item['k']} {item['off']:+.1%}" for item in wrong]
        lines += [f"  slow: {run['length']} B={run['batch']} {run['of_best']} (k {run['mean_k']})" for run in slow]
        lines += [f"  below k = 0: {run['length']} B={run['batch']} {run['of_plain']}" for run in losing]
    return "\n".join(lines)


def most_off(item: dict[str, Any]) -> float:
    """The most that a prediction may be off: more where runs of the same code differ by more."""
    return MOST_OFF_IN_NOISE if item["spread"] > MOST_OFF else MOST_OFF
