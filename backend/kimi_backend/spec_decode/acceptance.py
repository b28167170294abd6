"""The acceptance of a draft: for requests of one kind together, and how a sequence differs from its kind.

A rate at position j is conditional: of the rounds that kept position j - 1, the share that kept j. Positions behind a
rejection were compared with nothing and say nothing.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
import numpy.typing as npt

from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS

PRIOR_RATE = 0.6
"""Rate of a draft of which nothing is known."""
LATER_SHARE = 0.9
"""The share of the rate before it that a position's prior rate is."""
PRIOR_WEIGHT = 4.0
"""Verified tokens that a prior rate counts for, at each position."""
POOL_MEMORY = 400.0
"""Rounds, of all sequences of a kind together, after which an old round counts 1/e."""
SEQUENCE_MEMORY = 150.0
"""Verified tokens of one sequence, likewise."""
SEQUENCE_WEIGHT = 48.0
"""Verified tokens that its kind's rate counts for in a sequence's own. A text is easy or hard for some tens of tokens
on end, so few of them tell less of its whole than as many independent ones would."""
HIGHEST_RATE = 0.99
DEVIATIONS = 1.5
"""The most that a rate may exceed what was seen, in standard deviations of it: few rounds may have been bad luck."""

_OUTCOMES = MAX_SPECULATIVE_TOKENS + 1
"""Numbers of draft tokens that a verify can have, and can keep."""

Floats = npt.NDArray[np.float64]


class AcceptancePool:
    """Rates a position over the rounds of many sequences. Recent rounds count more."""

    def __init__(self) -> None:
        self._new = [0] * _OUTCOMES**2
        """Verifies since the last look, by what they drafted and kept: a fixed policy never looks."""
        self._tried = [0.0] * MAX_SPECULATIVE_TOKENS
        self._seen = [0.0] * MAX_SPECULATIVE_TOKENS
        """Those that were tried, older ones too: what is known for long is doubted less and less."""
        self._kept = [0.0] * MAX_SPECULATIVE_TOKENS

    def record(self, num_draft_tokens: int, num_accepted: int) -> None:
        """One verify. Cheap: it runs between the target's reply and the draft's call."""
        self._new[num_draft_tokens * _OUTCOMES + num_accepted] += 1

    def rates(self) -> list[float]:
        """[MAX_SPECULATIVE_TOKENS] conditional rates. A position that was seldom tried takes after the one before."""
        self._fold()
        rates, rate = [], PRIOR_RATE
        for tried, kept in zip(self._tried, self._kept, strict=True):
            rate = min((kept + PRIOR_WEIGHT * rate) / (tried + PRIOR_WEIGHT), HIGHEST_RATE)
            rates.append(rate)
            rate *= LATER_SHARE
        return rates

    def highest_rates(self) -> list[float]:
        """Those that may be, for all that was seen; a position is expected to be no better than the one before."""
        found, highest = [], HIGHEST_RATE
        for rate, seen in zip(self.rates(), self._seen, strict=True):
            highest = min(highest_rate(rate, seen + PRIOR_WEIGHT), highest)
            found.append(highest)
        return found

    @property
    def mean_rate(self) -> float:
        """Kept / verified tokens over all positions."""
        self._fold()
        prior = PRIOR_WEIGHT * PRIOR_RATE
        return min((sum(self._kept) + prior) / (sum(self._tried) + PRIOR_WEIGHT), HIGHEST_RATE)

    def fade(self, share: float) -> None:
        """Let the past count so much less, so that what is not measured any more falls back to the prior."""
        self._fold()
        self._scale(1 - share)
        self._seen = [(1 - share) * value for value in self._seen]

    def _fold(self) -> None:
        num_new = sum(self._new)
        if not num_new:
            return
        self._scale(max(0.0, 1 - num_new / POOL_MEMORY))
        for outcome, count in enumerate(self._new):
            if not count:
                continue
            num_draft_tokens, num_accepted = divmod(outcome, _OUTCOMES)
            for position in range(min(num_accepted + 1, num_draft_tokens)):
                self._tried[position] += count
                self._seen[position] += count
            for position in range(num_accepted):
                self._kept[position] += count
        self._new = [0] * _OUTCOMES**2

    def _scale(self, factor: float) -> None:
        self._tried = [factor * value for value in self._tried]
        self._kept = [factor * value for value in self._kept]


class SequenceAcceptance:
    """The difference of one sequence from its kind: one factor on all positions."""

    __slots__ = ("kept", "seen", "tried")

    def __init__(self) -> None:
        self.tried = self.kept = 0.0
        """Verified tokens, and those of them that were kept, older ones counting less."""
        self.seen = 0
        """Verified tokens, all counting alike."""

    def record(self, num_draft_tokens: int, num_accepted: int) -> None:
        verified = min(num_accepted + 1, num_draft_tokens)
        decay = 1 - verified / SEQUENCE_MEMORY
        self.tried = decay * self.tried + verified
        self.kept = decay * self.kept + num_accepted
        self.seen += verified

    def factor(self, pool_mean: float, *, highest: bool = False) -> float:
        """Return what to multiply the rates of its kind by; 1 while nothing is known.

        Args:
            pool_mean: `AcceptancePool.mean_rate` of its kind.
            highest: what may be, as in `AcceptancePool.highest_rates`; it makes a sequence no better than its kind.
        """
        rate = (self.kept + SEQUENCE_WEIGHT * pool_mean) / (self.tried + SEQUENCE_WEIGHT)
        if highest:
            rate = max(rate, min(highest_rate(rate, self.seen + SEQUENCE_WEIGHT), pool_mean))
        return rate / pool_mean


_WITHIN = np.arange(MAX_SPECULATIVE_TOKENS) < np.arange(MAX_SPECULATIVE_TOKENS + 1)[:, None]
"""[count] the positions of so many tokens."""


def chances(rates: Floats, factors: Sequence[float], limits: Sequence[int]) -> Floats:
    """[C, MAX_SPECULATIVE_TOKENS] how likely each draft token is kept, all before it being kept too.

    Args:
        rates: [C, MAX_SPECULATIVE_TOKENS] conditional ones of each sequence's kind.
        factors: [C] of `SequenceAcceptance` or `MatchAcceptance`.
        limits: [C] draft tokens that a sequence may have; the chance of one more is 0.
    """
    kept: Floats = np.minimum(rates * np.array(factors)[:, None], HIGHEST_RATE).cumprod(axis=1)
    return kept * _WITHIN[limits]


def highest_rate(rate: float, weight: float) -> float:
    """DEVIATIONS above a rate that so many verified tokens have shown."""
    return rate + DEVIATIONS * sqrt(rate * (1 - rate) / (weight + 1))
