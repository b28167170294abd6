"""The sequences that check what their text proposes instead of what the draft does, and how many tokens of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kimi_backend.spec_decode.acceptance import AcceptancePool, SequenceAcceptance, chances
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.lookup import LookupPools, MatchAcceptance, SequenceLookup
from kimi_backend.spec_decode.lookup_index import Match
from kimi_backend.spec_decode.policy import SpeculationPolicy
from kimi_backend.spec_decode.row_choice import Batch
from kimi_backend.spec_decode.step_times import Floats


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
        if batch.is_drafting:
            alone = replace(batch, num_proposed=0, is_drafting=False)
            self._note_alone(candidates, found, policy.choose_looked_up(found, alone).tolist())
        num_proposed = [c.num_proposed for c in candidates]
        is_better = found.sum(axis=1) > (self._proposed(candidates).sum(axis=1) if any(num_proposed) else 0.0)
        found[~is_better] = 0.0
        num_replaced = int(is_better @ num_proposed)
        others = replace(batch, num_proposed=batch.num_proposed - num_replaced)
        counts: list[int] = policy.choose_looked_up(found, others).tolist()
        if not batch.is_drafting:
            self._note_alone(candidates, found, counts)
        return counts

    def _found(self, candidates: list[Candidate]) -> Floats:
        """[C, MAX_SPECULATIVE_TOKENS] chances of what follows each one's match."""
        pools = [self.pools.of(c.match) for c in candidates]
        return _chances(pools, [c.lookup.acceptance for c in candidates], [c.most for c in candidates])

    def _proposed(self, candidates: list[Candidate]) -> Floats:
        """[C, MAX_SPECULATIVE_TOKENS] chances of what the draft proposes."""
        pools = [c.speculation.pool or self._untried for c in candidates]
        return _chances(pools, [c.speculation.acceptance for c in candidates], [c.num_proposed for c in candidates])

    def _note_alone(self, candidates: list[Candidate], found: Floats, counts: list[int]) -> None:
        """Note what each would check if there were no draft."""
        for candidate, likely, count in zip(candidates, found, counts, strict=True):
            candidate.speculation.looked_up.next = count, float(likely[:count].sum())
            self.pools.note(candidate.match, count > 0)


def _chances(
    pools: list[AcceptancePool], own: Sequence[SequenceAcceptance | MatchAcceptance], limits: list[int]
) -> Floats:
    rates = {pool: (pool.rates(), pool.mean_rate) for pool in set(pools)}
    factors = [acceptance.factor(rates[pool][1]) for acceptance, pool in zip(own, pools, strict=True)]
    return chances(np.array([rates[pool][0] for pool in pools]), factors, limits)
