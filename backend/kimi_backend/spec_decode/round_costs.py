"""What a round costs, by the number of sequences in it and of draft tokens each: measured, or guessed from neighbours.

Times are kept for 1, 2, 4, … sequences and 0 … 7 draft tokens, over a common factor that follows what moves all of
them alike (a busy machine, longer contexts). How two of them compare is learned from rounds next to each other: those
right after a change teach the new time, those further on the common factor.
"""

import math
from dataclasses import dataclass, field
from statistics import median

from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS

FIRST_SAMPLES = 3
"""Rounds whose median is the first value: one of them may have compiled something."""
LARGEST_SURPRISE = math.log(1.5)
"""A round counts as at most so far from what was expected, whatever held it up."""
FRESH_ROUNDS = 4
"""Rounds after a change that teach how the new number of draft tokens compares with the one before."""
FRESH_RATE, FRESH_COMMON_RATE = 0.2, 0.05
"""How much of a surprise a time follows over such rounds, at least, and in each of them the common factor."""
COMMON_RATE = 0.2
"""How much of a surprise the common factor follows later on."""
DRIFT_DOUBT = 0.3
"""Part of what the common factor has moved since a time was measured that may not be true of it."""
UNKNOWN_DOUBT, UNSEEN_DOUBT = 0.1, 1.0
"""Where a time was not measured; and of drafting nothing, where that was seen for no number of sequences."""
FIRST_SCATTER, LEAST_SCATTER, SCATTER_RATE = 0.1, 0.04, 0.03
"""Mean distance of such rounds from what was expected (a share of it): before any was seen, at least, and how fast it
follows."""
DEFAULT_GROWTH = 0.35
"""Cost grows as num_sequences ** growth between neighbours until both are known."""
DEFAULT_STEP = 0.06
"""Cost of one more draft token, as a share of a round without, until any is known: low, so that it is tried."""


@dataclass(slots=True)
class _Cell:
    log_s: float | None = None
    """Of the time over the common factor."""
    samples: list[float] = field(default_factory=list)
    num_rounds: int = 0
    """That taught it something."""
    num_stays: int = 0
    """Runs of rounds next to each other that it was measured in."""
    last_round: int = 0
    last_common: float = 0.0
    is_proxy: bool = False


class RoundCosts:
    """Seconds of a pure decode round in which each of `num_sequences` verifies and proposes `num_draft_tokens`."""

    def __init__(self) -> None:
        self._rows: dict[int, list[_Cell]] = {}
        self._log_common = 0.0
        self._num_rounds = 0
        self._scatter = FIRST_SCATTER
        self._stay = 0
        self._last: tuple[int, int] | None = None

    def record(self, num_sequences: int, num_draft_tokens: int, seconds: float, is_proxy: bool = False) -> None:
        """Learn from one round.

        Args:
            is_proxy: not such a round itself, but what comes close.
        """
        if seconds <= 0:
            return
        self._num_rounds += 1
        row = self._rows.setdefault(_row_of(num_sequences), [_Cell() for _ in range(MAX_SPECULATIVE_TOKENS + 1)])
        cell = row[num_draft_tokens]
        cell.is_proxy = is_proxy and (cell.is_proxy or not cell.num_rounds)
        cell.last_round = self._num_rounds
        place = (_row_of(num_sequences), num_draft_tokens)
        self._stay = self._stay + 1 if place == self._last else 1
        self._last = place
        cell.num_stays += self._stay == 1
        log_s = math.log(seconds) - self._growth(num_sequences, num_draft_tokens)
        if cell.log_s is None:
            self._begin(cell, log_s)
        else:
            self._follow(cell, log_s)
        cell.last_common = self._log_common

    def _begin(self, cell: _Cell, log_s: float) -> None:
        if not self._is_anything_known:
            self._log_common = log_s
        cell.num_rounds += 1
        cell.samples.append(log_s - self._log_common)
        if len(cell.samples) >= FIRST_SAMPLES:
            cell.log_s = median(cell.samples)

    def _follow(self, cell: _Cell, log_s: float) -> None:
        assert cell.log_s is not None
        surprise = log_s - self._log_common - cell.log_s
        surprise = max(-LARGEST_SURPRISE, min(surprise, LARGEST_SURPRISE))
        if self._stay <= FRESH_ROUNDS:
            self._scatter += SCATTER_RATE * (abs(surprise) - self._scatter)
            cell.num_rounds += 1
            rate = 1 / cell.num_rounds if cell.num_stays < 2 else max(FRESH_RATE, 1 / cell.num_stays) / FRESH_ROUNDS
            cell.log_s += rate * surprise
            self._log_common += FRESH_COMMON_RATE * surprise
        else:
            self._log_common += COMMON_RATE * surprise

    def is_known(self, num_sequences: int, num_draft_tokens: int) -> bool:
        """Whether it was measured for about so many sequences."""
        cell = self._cell(num_sequences, num_draft_tokens)
        return cell is not None and cell.log_s is not None

    def num_stays(self, num_sequences: int, num_draft_tokens: int) -> int:
        """In how many runs of rounds next to each other it was measured."""
        cell = self._cell(num_sequences, num_draft_tokens)
        return 0 if cell is None else cell.num_stays

    def doubt(self, num_sequences: int, num_draft_tokens: int) -> float:
        """How far off the estimate may well be, as a share of it."""
        cell = self._cell(num_sequences, num_draft_tokens)
        if cell is None or cell.log_s is None:
            is_known_elsewhere = any(row[num_draft_tokens].log_s is not None for row in self._rows.values())
            return UNKNOWN_DOUBT if num_draft_tokens or is_known_elsewhere else UNSEEN_DOUBT
        drift = abs(self._log_common - cell.last_common)
        return max(self._scatter, LEAST_SCATTER) / math.sqrt(cell.num_stays) + DRIFT_DOUBT * drift

    def is_proxy(self, num_sequences: int, num_draft_tokens: int) -> bool:
        """Whether no such round was seen itself."""
        cell = self._cell(num_sequences, num_draft_tokens)
        return cell is not None and cell.is_proxy

    def age(self, num_sequences: int, num_draft_tokens: int) -> float:
        """Rounds recorded since it was last measured; infinite if never."""
        cell = self._cell(num_sequences, num_draft_tokens)
        return math.inf if cell is None or cell.log_s is None else self._num_rounds - cell.last_round

    def estimates(self, num_sequences: int) -> list[float] | None:
        """[MAX_SPECULATIVE_TOKENS + 1] seconds for each number of draft tokens; None before anything was measured."""
        index = _row_of(num_sequences)
        known = [i for i, row in self._rows.items() if any(cell.log_s is not None for cell in row)]
        if not known:
            return None
        nearest = min(known, key=lambda i: (abs(i - index), i))
        shapes = sorted(known, key=lambda i: (abs(i - index), i))
        shape = next((s for s in map(self._shape, shapes) if s is not None), None) or _default_shape()
        times = self._fill(nearest, shape)
        growth = (
            self._growth(num_sequences, 0)
            if nearest == index
            else DEFAULT_GROWTH * math.log(num_sequences / 2**nearest)
        )
        factor = math.exp(self._log_common + growth)
        return [factor * time for time in times]

    @property
    def _is_anything_known(self) -> bool:
        return any(cell.log_s is not None or cell.samples for row in self._rows.values() for cell in row)

    def _cell(self, num_sequences: int, num_draft_tokens: int) -> _Cell | None:
        row = self._rows.get(_row_of(num_sequences))
        return None if row is None else row[num_draft_tokens]

    def _growth(self, num_sequences: int, num_draft_tokens: int) -> float:
        """Logarithm of how much more so many sequences cost than their row's own number."""
        index = _row_of(num_sequences)
        distance = math.log2(num_sequences) - index
        return self._exponent(index, index + (1 if distance > 0 else -1)) * distance * math.log(2) if distance else 0.0

    def _exponent(self, index: int, neighbour: int) -> float:
        row, next_row = self._rows.get(index), self._rows.get(neighbour)
        if row is not None and next_row is not None:
            for mine, other in zip(row, next_row, strict=True):
                if mine.log_s is not None and other.log_s is not None:
                    return max(0.0, min((other.log_s - mine.log_s) / (neighbour - index) / math.log(2), 1.0))
        return DEFAULT_GROWTH

    def _known(self, index: int) -> list[tuple[int, float]]:
        cells = enumerate(self._rows[index])
        return [(k, math.exp(cell.log_s)) for k, cell in cells if cell.log_s is not None]

    def _shape(self, index: int) -> list[float] | None:
        """[MAX_SPECULATIVE_TOKENS + 1] straight lines through what a row knows; None where that is less than two."""
        known = self._known(index)
        return _lines(known) if len(known) > 1 else None

    def _fill(self, index: int, shape: list[float]) -> list[float]:
        known = self._known(index)
        if len(known) > 1:
            return _lines(known)
        k, time = known[0]
        return [time * value / shape[k] for value in shape]


def _row_of(num_sequences: int) -> int:
    return round(math.log2(num_sequences))


def _default_shape() -> list[float]:
    return [1 + DEFAULT_STEP * k for k in range(MAX_SPECULATIVE_TOKENS + 1)]


def _lines(known: list[tuple[int, float]]) -> list[float]:
    """Straight lines between known points and on beyond the outer ones, never falling there."""
    result = []
    for k in range(MAX_SPECULATIVE_TOKENS + 1):
        right = min(max(1, sum(point <= k for point, _ in known)), len(known) - 1)
        (k0, t0), (k1, t1) = known[right - 1], known[right]
        slope = (t1 - t0) / (k1 - k0)
        value = t0 + slope * (k - k0)
        if k < known[0][0]:
            value = max(min(value, known[0][1]), 0.2 * known[0][1])
        if k > known[-1][0]:
            value = max(value, known[-1][1])
        result.append(value)
    return result
