"""How often a draft is right: for requests of one kind together, and how a sequence differs from its kind.

A rate at position j is conditional: of the rounds that kept position j - 1, the share that kept j. Positions behind a
rejection were compared with nothing and say nothing.
"""

from math import sqrt

from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS

FIRST_GUESS = 0.6
"""Rate of a draft of which nothing is known."""
GUESS_WEIGHT = 4.0
"""Verified tokens that a guess counts for, at each position."""
POOL_MEMORY = 400.0
"""Rounds, of all sequences of a kind together, after which an old round counts 1/e."""
SEQUENCE_MEMORY = 150.0
"""Verified tokens of one sequence, likewise."""
SEQUENCE_WEIGHT = 16.0
"""Verified tokens that its kind's rate counts for in a sequence's own."""
HIGHEST_RATE = 0.99


class AcceptancePool:
    """Rates a position over the rounds of many sequences. Recent rounds count more."""

    def __init__(self) -> None:
        self.num_rounds = self.num_accepted = 0
        """Verifies recorded, and draft tokens kept, since start; never forgotten."""
        self._new: list[tuple[int, int]] = []
        self._tried = [0.0] * MAX_SPECULATIVE_TOKENS
        self._kept = [0.0] * MAX_SPECULATIVE_TOKENS

    def record(self, num_draft_tokens: int, num_accepted: int) -> None:
        """One verify. Cheap: it runs between the target's reply and the draft's call."""
        self.num_rounds += 1
        self.num_accepted += num_accepted
        self._new.append((num_draft_tokens, num_accepted))

    def rates(self) -> list[float]:
        """[MAX_SPECULATIVE_TOKENS] conditional rates. A position that was seldom tried takes after the one before."""
        self._fold()
        rates, guess = [], FIRST_GUESS
        for tried, kept in zip(self._tried, self._kept, strict=True):
            guess = (kept + GUESS_WEIGHT * guess) / (tried + GUESS_WEIGHT)
            rates.append(min(guess, HIGHEST_RATE))
        return rates

    @property
    def num_remembered(self) -> float:
        """Rounds that the rates rest on, older ones counting less."""
        self._fold()
        return self._tried[0]

    @property
    def mean_rate(self) -> float:
        """Kept / verified tokens over all positions."""
        self._fold()
        guess = GUESS_WEIGHT * FIRST_GUESS
        return min((sum(self._kept) + guess) / (sum(self._tried) + GUESS_WEIGHT), HIGHEST_RATE)

    def forget(self, num_rounds: float) -> None:
        """Let the past count for at most so many rounds, so that what comes now is believed."""
        self._fold()
        if self._tried[0] > num_rounds:
            self._scale(num_rounds / self._tried[0])

    def _fold(self) -> None:
        if not self._new:
            return
        self._scale(max(0.0, 1 - len(self._new) / POOL_MEMORY))
        for num_draft_tokens, num_accepted in self._new:
            for position in range(min(num_accepted + 1, num_draft_tokens)):
                self._tried[position] += 1
            for position in range(num_accepted):
                self._kept[position] += 1
        self._new.clear()

    def _scale(self, factor: float) -> None:
        self._tried = [factor * value for value in self._tried]
        self._kept = [factor * value for value in self._kept]


class SequenceAcceptance:
    """How one sequence differs from its kind: one factor on all positions."""

    def __init__(self) -> None:
        self.tried = self.kept = 0.0
        """Verified tokens, and those of them that were kept, older ones counting less."""

    def record(self, num_draft_tokens: int, num_accepted: int) -> None:
        verified = min(num_accepted + 1, num_draft_tokens)
        decay = 1 - verified / SEQUENCE_MEMORY
        self.tried = decay * self.tried + verified
        self.kept = decay * self.kept + num_accepted

    def factor(self, pool_mean: float) -> float:
        """What to multiply the kind's rates by; 1 while nothing is known."""
        rate = (self.kept + SEQUENCE_WEIGHT * pool_mean) / (self.tried + SEQUENCE_WEIGHT)
        return rate / pool_mean

    def forget(self) -> None:
        self.tried = self.kept = 0.0


def doubt_of_gain(rates: list[float], num_draft_tokens: int, num_rounds: float) -> float:
    """One standard error of the draft tokens kept a round, if these rates were seen in so many rounds."""
    reached, mean, square = 1.0, 0.0, 0.0
    for position, rate in enumerate(rates[:num_draft_tokens]):
        reached *= rate
        mean += reached
        square += (2 * position + 1) * reached
    return sqrt(max(square - mean**2, 0.05) / (num_rounds + 1))


def gains(rates: list[float], factor: float, limit: int) -> list[float]:
    """[limit + 1] draft tokens that a round of k = 0, 1, … limit is expected to keep."""
    total, reached, result = 0.0, 1.0, [0.0]
    for rate in rates[:limit]:
        reached *= min(factor * rate, HIGHEST_RATE)
        total += reached
        result.append(total)
    return result
