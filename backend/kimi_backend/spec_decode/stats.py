"""Counts what speculation did, for one request or for the engine; reported only where it ran."""

from typing import Any

from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS, SpeculationStats


class SpeculationCounter:
    """Adds up rounds. A round is a verify that carried at least one draft token."""

    def __init__(self, max_draft_tokens: int = MAX_SPECULATIVE_TOKENS) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._accepted_histogram = [0] * (max_draft_tokens + 1)
        self._drafted_histogram = [0] * (max_draft_tokens + 1)

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
        drafted, accepted = _at_least(self._drafted_histogram), _at_least(self._accepted_histogram)
        return SpeculationStats(
            num_spec_steps=num_rounds,
            num_draft_tokens=sum(drafted),
            num_accepted_draft_tokens=sum(accepted),
            acceptance_histogram=tuple(self._accepted_histogram),
            drafted_per_position=drafted,
            accepted_per_position=accepted,
        )


def _at_least(histogram: list[int]) -> tuple[int, ...]:
    """[k]: rounds whose count was at least 1, 2, … k."""
    totals, running = [], 0
    for count in reversed(histogram[1:]):
        running += count
        totals.append(running)
    return tuple(reversed(totals))


def speculation_as_json(stats: SpeculationStats) -> dict[str, Any]:
    """The object that AIPerf reads as `speculative_decoding`, and the per-position counts behind it."""
    return {
        "num_spec_steps": stats.num_spec_steps,
        "num_spec_tokens": len(stats.acceptance_histogram) - 1,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "acceptance_histogram": list(stats.acceptance_histogram),
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "drafted_per_position": list(stats.drafted_per_position),
        "accepted_per_position": list(stats.accepted_per_position),
        "acceptance_per_position": list(stats.acceptance_per_position),
    }
