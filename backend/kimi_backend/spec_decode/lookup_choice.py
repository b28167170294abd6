"""Which sequences check what their text proposes instead of what the draft does, and how many tokens of it."""

from dataclasses import dataclass

import numpy as np

from kimi_backend.spec_decode.acceptance import AcceptancePool, SequenceAcceptance, chances
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.lookup import LookupPools, SequenceLookup
from kimi_backend.spec_decode.lookup_index import Match
from kimi_backend.spec_decode.policy import SpeculationPolicy
from kimi_backend.spec_decode.step_times import Floats


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence whose text has a match."""

    lookup: SequenceLookup
    match: Match
    speculation: SpeculationController
    num_proposed: int
    """Tokens that the draft has proposed."""
    most: int
    """Tokens that may be looked up for it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """All sequences that run."""

    num_sequences: int
    num_proposed: int
    """Tokens that the draft has proposed."""
    num_context_tokens: int


class LookupChooser:
    """Compares what both are expected to keep, and takes looked-up tokens by what their rows cost."""

    def __init__(self) -> None:
        self.pools = LookupPools()
        self._untried = AcceptancePool()

    def choose(self, candidates: list[Candidate], policy: SpeculationPolicy, batch: Batch) -> list[int]:
        """How many tokens each checks of what follows its match; 0: what the draft has proposed, if anything."""
        found = self._chances([(self.pools.of(c.match), c.lookup.acceptance, c.most) for c in candidates])
        proposed = self._chances(
            [(c.speculation.pool or self._untried, c.speculation.acceptance, c.num_proposed) for c in candidates]
        )
        is_better = found.sum(axis=1) > proposed.sum(axis=1)
        found[~is_better] = 0.0
        num_replaced = sum(c.num_proposed for c, better in zip(candidates, is_better.tolist(), strict=True) if better)
        num_others = batch.num_proposed - num_replaced
        counts: list[int] = policy.choose_looked_up(
            found, batch.num_sequences, num_others, batch.num_context_tokens
        ).tolist()
        return counts

    @staticmethod
    def _chances(sources: list[tuple[AcceptancePool, SequenceAcceptance, int]]) -> Floats:
        """[C, MAX_SPECULATIVE_TOKENS] chances that the first tokens of each are kept; 0 for more than a count."""
        pools = {id(pool): pool for pool, _, _ in sources}
        rates = {key: pool.rates() for key, pool in pools.items()}
        means = {key: pool.mean_rate for key, pool in pools.items()}
        return chances(
            np.array([rates[id(pool)] for pool, _, _ in sources]),
            np.array([own.factor(means[id(pool)]) for pool, own, _ in sources]),
            np.array([count for _, _, count in sources]),
        )
