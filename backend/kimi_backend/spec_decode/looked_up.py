"""The share looked up: what a round without the draft has too, and where nobody needs the draft's proposals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kimi_backend.spec_decode.step_times import Floats

KIND_MEMORY = 800.0
"""Tokens, of all sequences of a kind together, after which an old one counts 1/e."""
SEQUENCE_MEMORY = 64.0
"""Tokens of one sequence, likewise: matches come in runs."""
SEQUENCE_WEIGHT = 16.0
"""Tokens that its kind's mean counts for in a sequence's own."""
LEAST_MATCHES = 1e-9
"""Instead of none, where there is nothing to divide either."""


class LookedUp:
    """Counts what of a text would have been looked up, had there been no draft. Recent tokens count more.

    Tokens are counted, since verifies tell of who proposed: a draft makes those without a match fewer, and its tokens
    reach into matches that would have been found.
    """

    __slots__ = ("_memory", "kind", "next", "sums", "weight")

    def __init__(self, memory: float = SEQUENCE_MEMORY) -> None:
        self._memory = memory
        self.kind: LookedUp | None = None
        """That of all sequences like it, told of each verify too; given by the policy, if that learns."""
        self.next = (0, 0.0)
        """Tokens that the next verify would check of a match if there were no draft; those expected to be kept."""
        self.weight = 0.0
        """Tokens that came."""
        self.sums = (0.0, 0.0, 0.0, 0.0)
        """Tokens that would have come in verifies of a match; such verifies that were; tokens that these checked of it;
        and those that they kept."""

    def end_verify(self, num_tokens: int, num_found: int, num_checked: int) -> None:
        """The verify that was the next one is done.

        Args:
            num_tokens: those that came.
            num_found: `SequenceLookup.num_found` of them.
            num_checked: tokens of a match that it had.
        """
        count, kept = (num_checked, num_tokens - 1.0) if num_checked else self.next
        self.next = (0, 0.0)
        self.record(num_tokens, num_found, count, kept)

    def record(self, num_tokens: int, num_found: float, num_checked: float, num_kept: float) -> None:
        """Tokens that came at once, `num_found` of them in verifies of a match, and what the first of these checked."""
        fading = 1 - num_tokens / self._memory
        found, matches, checked, kept = self.sums
        self.sums = (
            fading * found + num_found,
            fading * matches + (num_checked > 0),
            fading * checked + num_checked,
            fading * kept + num_kept,
        )
        self.weight = fading * self.weight + num_tokens
        if self.kind is not None:
            self.kind.record(num_tokens, num_found, num_checked, num_kept)


class Expected(NamedTuple):
    """The matches that the next rounds are expected to check for C sequences, while nobody drafts."""

    shares: Floats
    """[C] of rounds in which a sequence checks tokens of a match."""
    num_tokens: Floats
    """[C] tokens of a match under verification, in a round that has one."""
    num_kept: Floats
    """[C] those of them that are kept."""

    def beside(self, chances: Floats) -> tuple[Floats, Floats, Floats]:
        """Count what rounds have beside the target's own tokens if a sequence drafts none, one, … tokens where it has
        no match. Rounds without one become fewer by what the draft has right in them.

        Args:
            chances: [C, K] of the draft's tokens to be kept, all before them being kept too.

        Returns:
            [C, 1 + K] tokens that are kept, [C, 1 + K] those under verification, and [C] the shares of rounds with a
            match if one is drafted.
        """
        num_drafted = np.arange(chances.shape[1] + 1)
        drafted = np.concatenate([np.zeros((len(chances), 1)), chances.cumsum(axis=1)], axis=1)
        shares = self.shares[:, None] * (1 + drafted) / (1 + self.shares[:, None] * drafted)
        kept = shares * self.num_kept[:, None] + (1 - shares) * drafted
        rows = shares * self.num_tokens[:, None] + (1 - shares) * num_drafted
        return kept, rows, shares[:, 1]

    @classmethod
    def of(cls, sequences: Sequence[LookedUp]) -> "Expected | None":
        """Expect what was seen of each, and of its kind. None where that is nothing."""
        kinds = {s.kind for s in sequences}
        if not any(one.sums[1] for one in (*sequences, *kinds) if one is not None):
            return None
        means = {kind: _mean(kind) for kind in kinds}
        sums = np.array([s.sums for s in sequences]) + SEQUENCE_WEIGHT * np.array([means[s.kind] for s in sequences])
        weights = np.array([s.weight for s in sequences]) + SEQUENCE_WEIGHT
        found, matches, checked, kept = sums.T
        matches = np.maximum(matches, LEAST_MATCHES)
        num_kept = kept / matches
        with_match = found / (1 + num_kept)
        return cls(with_match / (with_match + np.maximum(weights - found, 0)), checked / matches, num_kept)


def _mean(kind: LookedUp | None) -> Floats:
    return np.zeros(4) if kind is None or not kind.weight else np.array(kind.sums) / kind.weight
