"""The share looked up: what a round without the draft has too, and where nobody needs the draft's proposals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kimi_backend.spec_decode.step_times import Floats

KIND_MEMORY = 400.0
"""Verifies, of all sequences of a kind together, after which an old one counts 1/e."""
SEQUENCE_MEMORY = 32.0
"""Verifies of one sequence, likewise: matches come in runs."""
SEQUENCE_WEIGHT = 8.0
"""Verifies that its kind's mean counts for in a sequence's own."""


class LookedUp:
    """Counts what would have been looked up for verifies, had there been no draft. Recent ones count more."""

    __slots__ = ("_memory", "kind", "next", "sums", "weight")

    def __init__(self, memory: float = SEQUENCE_MEMORY) -> None:
        self._memory = memory
        self.kind: LookedUp | None = None
        """That of all sequences like it, told of each verify too; given by the policy, if that learns."""
        self.next = (0, 0.0)
        """Tokens that the next verify would check of a match if there were no draft; those expected to be kept."""
        self.weight = 0.0
        """Verifies."""
        self.sums = (0.0, 0.0, 0.0)
        """Verifies with tokens of a match; such tokens; those of them that were expected to be kept."""

    def end_verify(self) -> None:
        """The verify that was the next one is done."""
        self.record(*self.next)
        self.next = (0, 0.0)

    def record(self, num_tokens: int, num_kept: float) -> None:
        """One verify, with so many tokens of a match."""
        fading = 1 - 1 / self._memory
        used, tokens, kept = self.sums
        self.sums = (fading * used + (num_tokens > 0), fading * tokens + num_tokens, fading * kept + num_kept)
        self.weight = fading * self.weight + 1
        if self.kind is not None:
            self.kind.record(num_tokens, num_kept)


class Expected(NamedTuple):
    """The tokens that the next rounds are expected to look up for C sequences."""

    shares: Floats
    """[C] of rounds in which a sequence checks tokens of a match, and none of the draft."""
    num_tokens: float
    """Tokens of matches under verification, of all together, in a round."""
    num_kept: float
    """Those of them that are kept."""

    @property
    def share(self) -> float:
        """The share of rounds in which some have a match."""
        return 1 - float(np.prod(1 - self.shares))

    @classmethod
    def of(cls, sequences: Sequence[LookedUp]) -> "Expected | None":
        """Expect what was seen of each, and of its kind. None where that is nothing."""
        kinds = {id(s.kind): s.kind for s in sequences}
        if not any(s.sums[0] for s in sequences) and not any(kind and kind.sums[0] for kind in kinds.values()):
            return None
        means = {key: _mean(kind) for key, kind in kinds.items()}
        sums = np.array([s.sums for s in sequences]) + SEQUENCE_WEIGHT * np.array(
            [means[id(s.kind)] for s in sequences]
        )
        found = sums / (np.array([s.weight for s in sequences]) + SEQUENCE_WEIGHT)[:, None]
        return cls(found[:, 0], float(found[:, 1].sum()), float(found[:, 2].sum()))


def _mean(kind: LookedUp | None) -> Floats:
    return np.zeros(3) if kind is None or not kind.weight else np.array(kind.sums) / kind.weight
