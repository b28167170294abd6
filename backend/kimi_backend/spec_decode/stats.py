"""Counts what speculation did, for one request or for the engine; reported only where it ran."""

from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS, SpeculationStats, TokenOrigin

PROPOSER_NAMES = {TokenOrigin.DRAFT: Proposer.EAGLE3.value, TokenOrigin.LOOKUP: Proposer.LOOKUP.value}
"""The proposer of what was accepted, as statistics, metrics and the log name it."""


class SpeculationCounter:
    """Adds up rounds. A round is a verify that carried at least one draft token."""

    def __init__(self, num_positions: int | None = None) -> None:
        """num_positions: draft positions to report; None: as many as were ever drafted."""
        self._num_positions = num_positions
        self._accepted_histogram = [0] * (MAX_SPECULATIVE_TOKENS + 1)
        self._drafted_histogram = [0] * (MAX_SPECULATIVE_TOKENS + 1)

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count one verify; one without draft tokens is no round."""
        if num_draft_tokens:
            self._drafted_histogram[num_draft_tokens] += 1
            self._accepted_histogram[num_accepted] += 1

    def snapshot(self) -> SpeculationStats | None:
        """The totals so far; None when no round ran."""
        num_rounds = sum(self._drafted_histogram)
        if not num_rounds:
            return None
        longest = max(k for k, count in enumerate(self._drafted_histogram) if count)
        length = longest if self._num_positions is None else self._num_positions
        drafted = _at_least(self._drafted_histogram)[:length]
        accepted = _at_least(self._accepted_histogram)[:length]
        return SpeculationStats(
            num_spec_steps=num_rounds,
            num_draft_tokens=sum(drafted),
            num_accepted_draft_tokens=sum(accepted),
            acceptance_histogram=tuple(self._accepted_histogram[: length + 1]),
            drafted_per_position=drafted,
            accepted_per_position=accepted,
        )


class ProposerCounter:
    """Adds up rounds by who had proposed their tokens, and all together."""

    def __init__(self, num_positions: int | None = None) -> None:
        """num_positions: as in `SpeculationCounter`."""
        self.all = SpeculationCounter(num_positions)
        self._by_origin = {origin: SpeculationCounter(num_positions) for origin in PROPOSER_NAMES}

    def add(self, origin: TokenOrigin, num_draft_tokens: int, num_accepted: int) -> None:
        """Count one verify; one without draft tokens is no round."""
        if num_draft_tokens:
            self.all.add(num_draft_tokens, num_accepted)
            self._by_origin[origin].add(num_draft_tokens, num_accepted)

    def snapshot_by_name(self) -> dict[str, SpeculationStats]:
        """Proposer -> the totals so far of those that had a round."""
        found = {PROPOSER_NAMES[origin]: counter.snapshot() for origin, counter in self._by_origin.items()}
        return {name: stats for name, stats in found.items() if stats is not None}


def _at_least(histogram: list[int]) -> tuple[int, ...]:
    """[k]: rounds whose count was at least 1, 2, … k."""
    totals, running = [], 0
    for count in reversed(histogram[1:]):
        running += count
        totals.append(running)
    return tuple(reversed(totals))
