"""The sequences that check what their text proposes instead of what the draft does, and how many tokens of it."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kimi_backend.spec_decode.acceptance import AcceptancePool, kept_chances
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.lookup import LookupPools, SequenceLookup
from kimi_backend.spec_decode.lookup_index import Match
from kimi_backend.spec_decode.policy import SpeculationPolicy
from kimi_backend.spec_decode.row_choice import Batch
from kimi_backend.spec_decode.step_times import Floats
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS


class Candidate(NamedTuple):
    """A sequence whose text has a match."""

    lookup: SequenceLookup
    match: Match
    speculation: SpeculationController
    num_proposed: int
    """Tokens that the draft has proposed."""
    most: int
    """Tokens that may be looked up for it."""


class LookupChooser:
    """Compares what both are expected to keep, and takes looked-up tokens by what their rows cost."""

    def __init__(self) -> None:
        self.pools = LookupPools()
        self._untried = AcceptancePool()

    def choose(self, candidates: list[Candidate], policy: SpeculationPolicy, batch: Batch) -> list[int]:
        """Choose how many tokens each checks of what follows its match; 0: what the draft has proposed, if anything.

        Args:
            candidates: one at least.
        """
        found = self._found(candidates)
        found[_BEYOND[[c.most for c in candidates]]] = 0.0
        if batch.is_drafting:
            alone = replace(batch, num_proposed=0, is_drafting=False)
            self._note_alone(candidates, found, policy.choose_looked_up(found, alone).tolist())
        num_proposed = [c.num_proposed for c in candidates]
        proposed = np.zeros_like(found)
        if any(num_proposed):
            proposed = self._proposed(candidates)
            proposed[_BEYOND[num_proposed]] = 0.0
        is_better = found.sum(axis=1) > proposed.sum(axis=1)
        found[~is_better] = 0.0
        num_replaced = sum(c.num_proposed for c, better in zip(candidates, is_better.tolist(), strict=True) if better)
        others = replace(batch, num_proposed=batch.num_proposed - num_replaced)
        counts: list[int] = policy.choose_looked_up(found, others).tolist()
        if not batch.is_drafting:
            self._note_alone(candidates, found, counts)
        return counts

    def _found(self, candidates: list[Candidate]) -> Floats:
        """[C, MAX_SPECULATIVE_TOKENS] chances of what follows each one's match."""
        pools = [self.pools.of(c.match) for c in candidates]
        rates = _rates(pools)
        factors = []
        for candidate, pool in zip(candidates, pools, strict=True):
            acceptance = candidate.lookup.acceptance
            acceptance.expected_rate = rates[pool][1]
            factors.append(acceptance.factor)
        return kept_chances(np.array([rates[pool][0] for pool in pools]), factors)

    def _proposed(self, candidates: list[Candidate]) -> Floats:
        """[C, MAX_SPECULATIVE_TOKENS] chances of what the draft proposes."""
        pools = [c.speculation.pool or self._untried for c in candidates]
        rates = _rates(pools)
        own = [c.speculation.acceptance for c in candidates]
        factors = [acceptance.factor(rates[pool][1]) for acceptance, pool in zip(own, pools, strict=True)]
        return kept_chances(np.array([rates[pool][0] for pool in pools]), factors)

    def _note_alone(self, candidates: list[Candidate], found: Floats, counts: list[int]) -> None:
        for candidate, chances, count in zip(candidates, found, counts, strict=True):
            candidate.speculation.looked_up.next = count, float(chances[:count].sum())
            self.pools.note(candidate.match, count > 0)


_BEYOND = np.arange(MAX_SPECULATIVE_TOKENS) >= np.arange(MAX_SPECULATIVE_TOKENS + 1)[:, None]
"""[count] the positions behind so many tokens."""


def _rates(pools: list[AcceptancePool]) -> dict[AcceptancePool, tuple[list[float], float]]:
    """The conditional rates of each pool, and their mean."""
    return {pool: (pool.rates(), pool.mean_rate) for pool in set(pools)}
