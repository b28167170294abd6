"""What drafting costs: how much longer a round takes for each number of draft tokens, learned from neighbours in time.

A machine that is busy with other things moves all rounds for a while. So times are never compared with those of long
ago: wherever the number of draft tokens changes, the last rounds before are compared with the first ones after. Each
change gives one logarithm of a ratio; their mean, and how far they scatter, say what is known and how well.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import exp, log, log2, sqrt
from statistics import fmean, median

import numpy as np

from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS

COMPARED_ROUNDS = 8
"""At most so many on each side of a change."""
FEWEST_COMPARED = 2
LONGEST_GAP = 12
"""Rounds, those with prompts among them, that may lie between the two sides."""
KEPT_CHANGES = 64
"""Per pair of numbers; older ones are forgotten."""
LARGEST_SURPRISE = 1.0
"""A round counts as at most so far (a logarithm) from the median beside it, whatever held it up."""
FIRST_SCATTER, LEAST_SCATTER, SCATTER_RATE = 0.1, 0.03, 0.1
"""Mean distance of a change from the median of its kind: before any was seen, at least, and how fast it follows."""
INDEPENDENT_SHARE = 0.6
"""Of changes: the two at both ends of a visit share its rounds."""
BIAS = 0.015
"""What more changes of a kind do not make surer."""
GROWTH = 0.35
"""Cost grows about as num_sequences ** GROWTH between the sizes that are kept apart, which are powers of two."""
FIRST_STEP, FIRST_DOUBT = 0.10, 0.50
"""Logarithm of what the first draft token costs, and how far off that may be, until it was measured."""
NEXT_STEP, NEXT_DOUBT = 0.06, 0.10
"""Likewise of each further one: low, so that it is tried."""
FOLLOWING = MAX_SPECULATIVE_TOKENS + 1
"""Stands for a round whose draft only follows: nearly one without a draft, and measured far more often."""
FOLLOWING_DOUBT, FOLLOWING_AHEAD_DOUBT = 0.03, 0.1
"""How far off that may be, until rounds without a draft were seen beside others, where the engine waits for its draft;
and where it launches ahead, so that the time without a draft is worked out of what host and target take."""
NEIGHBOUR_DOUBT = 0.10
"""How far a step may differ for twice as many sequences."""


@dataclass(slots=True)
class _Stay:
    """Rounds next to each other with one number of draft tokens."""

    row: int
    num_draft_tokens: int
    share: float
    first_round: int
    last_round: int
    log_s: list[float] = field(default_factory=list)
    is_compared: bool = False


@dataclass(frozen=True, slots=True)
class CostRatios:
    """For 0, 1, … MAX_SPECULATIVE_TOKENS draft tokens."""

    log_ratio: list[float]
    """Logarithm of a round's time over that of one without draft."""
    doubt: list[float]
    """One standard error of it."""
    covariance: list[list[float]]
    """[FOLLOWING][FOLLOWING] of the logarithms for 1, 2, … draft tokens and a draft that only follows."""

    def doubt_between(self, k: int, other: int) -> float:
        """One standard error of the logarithm of the ratio of two numbers of draft tokens, 1 or more each."""
        c, i, j = self.covariance, k - 1, other - 1
        return sqrt(max(c[i][i] + c[j][j] - 2 * c[i][j], 0.0))

    @property
    def doubt_of_following(self) -> float:
        """How far a round whose draft only follows may be from one without, as a logarithm."""
        return sqrt(self.covariance[-1][-1])

    @property
    def times(self) -> list[float]:
        """In rounds without draft."""
        return [exp(value) for value in self.log_ratio]


class RoundCosts:
    """Compares pure decode rounds in which each of `num_sequences` verifies and proposes `num_draft_tokens`."""

    def __init__(self) -> None:
        self._changes: dict[int, dict[tuple[int, int], deque[float]]] = {}
        """By row, which is the number of sequences as a rounded power of two, and pair of numbers, the lower first."""
        self.launches_ahead = False
        """Whether the engine does not wait for its draft."""
        self._scatter = FIRST_SCATTER
        self._num_rounds = 0
        self._before: _Stay | None = None
        self._stay: _Stay | None = None
        self._known: dict[int, CostRatios] = {}
        self._estimate(0)  # numpy loads its linear algebra now, not while somebody waits for a token

    def pass_round(self) -> None:
        """A round that says nothing."""
        self._num_rounds += 1

    def record(self, num_sequences: int, num_draft_tokens: int, seconds: float, share: float = 1.0) -> None:
        """Learn from one round.

        Args:
            num_draft_tokens: or FOLLOWING.
            share: of what drafting adds, the part that this round had because only some sequences draft.
        """
        self._num_rounds += 1
        if seconds <= 0:
            return
        row, stay = row_of(num_sequences), self._stay
        if stay is None or (stay.row, stay.num_draft_tokens, stay.share) != (row, num_draft_tokens, share):
            self._compare()
            self._before = stay
            stay = self._stay = _Stay(row, num_draft_tokens, share, self._num_rounds, self._num_rounds)
        stay.last_round = self._num_rounds
        stay.log_s.append(log(seconds) - GROWTH * log(num_sequences))
        del stay.log_s[:-COMPARED_ROUNDS]
        if not stay.is_compared and len(stay.log_s) >= COMPARED_ROUNDS:
            self._compare()

    def _compare(self) -> None:
        """The stay with the one before it."""
        before, stay = self._before, self._stay
        if before is None or stay is None or stay.is_compared or before.row != stay.row:
            return
        a, b = before.num_draft_tokens, stay.num_draft_tokens
        is_near = stay.first_round - before.last_round <= LONGEST_GAP
        if a == b or not is_near or min(len(before.log_s), len(stay.log_s)) < FEWEST_COMPARED:
            return
        stay.is_compared = True
        change = _mean(stay.log_s, LARGEST_SURPRISE) - _mean(before.log_s, LARGEST_SURPRISE)
        share = min(stay.share, before.share)
        if share < 1:
            is_rising = _is_plain(a)
            if is_rising == _is_plain(b):
                return
            change = _as_if_all(change if is_rising else -change, share) * (1 if is_rising else -1)
        self._learn(stay.row, (min(a, b), max(a, b)), change if a < b else -change)

    def _learn(self, row: int, pair: tuple[int, int], change: float) -> None:
        self._known.clear()
        changes = self._changes.setdefault(row, {}).setdefault(pair, deque(maxlen=KEPT_CHANGES))
        changes.append(change)
        if len(changes) > 2:
            distance = abs(change - median(changes))
            rate = max(SCATTER_RATE, 1 / len(changes))
            self._scatter += rate * (min(distance, 4 * self._scatter) - self._scatter)

    def forget(self, num_sequences: int, num_kept: int) -> None:
        """Let only the latest changes count, so that new ones are believed."""
        self._known.clear()
        for changes in self._changes.get(row_of(num_sequences), {}).values():
            while len(changes) > num_kept:
                changes.popleft()

    def num_changes(self, num_sequences: int, num_draft_tokens: int) -> int:
        """Comparisons of this number of draft tokens with any other."""
        changes = self._changes.get(row_of(num_sequences), {})
        return sum(len(values) for pair, values in changes.items() if num_draft_tokens in pair)

    def ratios(self, num_sequences: int) -> CostRatios:
        """What is known for about so many sequences; guessed from other sizes where little is."""
        row = row_of(num_sequences)
        if row not in self._known:
            self._known[row] = self._estimate(row)
        return self._known[row]

    def _estimate(self, row: int) -> CostRatios:
        """The most likely steps from one number to the next, given a guess of each and all changes: least squares."""
        size = FOLLOWING + 1
        # Lists: an array takes twenty times as long for one number, and this runs between two rounds.
        weights, sums = [[0.0] * size for _ in range(size)], [0.0] * size

        def add(a: int, b: int, value: float, doubt: float) -> None:
            weight = 1 / doubt**2
            weights[a][a] += weight
            weights[b][b] += weight
            weights[a][b] -= weight
            weights[b][a] -= weight
            sums[b] += weight * value
            sums[a] -= weight * value

        for k, (step, doubt) in enumerate(self._guesses(row)):
            add(k, k + 1, step, doubt)
        add(0, FOLLOWING, 0.0, FOLLOWING_AHEAD_DOUBT if self.launches_ahead else FOLLOWING_DOUBT)
        for (a, b), changes in self._changes.get(row, {}).items():
            add(a, b, _mean(changes, 4 * max(self._scatter, LEAST_SCATTER)), self._doubt(len(changes)))
        covariance = np.linalg.inv(np.array(weights)[1:, 1:])
        log_ratio = (covariance @ np.array(sums[1:]))[:MAX_SPECULATIVE_TOKENS]
        doubt = np.sqrt(covariance.diagonal())[:MAX_SPECULATIVE_TOKENS]
        return CostRatios([0.0, *log_ratio.tolist()], [0.0, *doubt.tolist()], covariance.tolist())

    def _doubt(self, num_changes: int) -> float:
        """Of a mean; a standard deviation is 1.25 times the mean distance."""
        deviation = 1.25 * max(self._scatter, LEAST_SCATTER)
        return sqrt(deviation**2 / (INDEPENDENT_SHARE * num_changes) + BIAS**2)

    def _guesses(self, row: int) -> list[tuple[float, float]]:
        """(step, doubt) from each number of draft tokens to the next, before this row's own changes."""
        defaults = [(FIRST_STEP, FIRST_DOUBT)] + [(NEXT_STEP, NEXT_DOUBT)] * (MAX_SPECULATIVE_TOKENS - 1)
        others = [other for other in self._changes if other != row]
        if not others:
            return defaults
        nearest = min(others, key=lambda other: (abs(other - row), other))
        known = self._estimate_alone(nearest)
        further = NEIGHBOUR_DOUBT * abs(nearest - row)
        guesses = []
        for k, (_, doubt) in enumerate(defaults):
            step = known.log_ratio[k + 1] - known.log_ratio[k]
            guesses.append((step, min(doubt, sqrt(further**2 + known.doubt[k + 1] ** 2))))
        return guesses

    def _estimate_alone(self, row: int) -> CostRatios:
        """As if no other size had been seen."""
        alone = RoundCosts()
        alone._changes, alone._scatter = {row: self._changes[row]}, self._scatter
        alone.launches_ahead = self.launches_ahead
        return alone._estimate(row)


def row_of(num_sequences: int) -> int:
    """The size that so many sequences count as: a power of two."""
    return round(log2(num_sequences))


def _is_plain(num_draft_tokens: int) -> bool:
    """Whether nothing was drafted."""
    return num_draft_tokens in (0, FOLLOWING)


def _mean(values: Collection[float], furthest: float) -> float:
    """Of what lies within `furthest` of the median; what lies further counts as that far."""
    middle = median(values)
    return fmean(min(max(value, middle - furthest), middle + furthest) for value in values)


def _as_if_all(change: float, share: float) -> float:
    """Logarithm of the ratio if all had drafted."""
    return log(max(1 + (exp(change) - 1) / share, 0.2))
