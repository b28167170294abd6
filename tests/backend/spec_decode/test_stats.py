import random

import pytest

from kimi_backend.spec_decode.policy import policy_shares
from kimi_backend.spec_decode.stats import SpeculationCounter


def test_nothing_is_reported_before_a_round_ran() -> None:
    counter = SpeculationCounter(3)
    counter.add(0, 0)
    assert counter.snapshot() is None


def test_each_position_is_divided_by_the_rounds_that_proposed_it() -> None:
    counter = SpeculationCounter(3)
    for drafted, accepted in ((3, 3), (3, 1), (1, 1), (1, 0), (2, 2)):
        counter.add(drafted, accepted)
    stats = counter.snapshot()
    assert stats is not None
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (5, 10, 7)
    assert stats.acceptance_histogram == (1, 2, 1, 1)
    assert stats.drafted_per_position == (5, 3, 2)
    assert stats.accepted_per_position == (4, 2, 1)
    assert stats.acceptance_per_position == (4 / 5, 2 / 3, 1 / 2)
    assert stats.mean_acceptance_length == pytest.approx(2.4)
    assert stats.draft_acceptance_rate == 0.7


def test_a_position_never_proposed_has_no_rate() -> None:
    counter = SpeculationCounter(3)
    counter.add(1, 1)
    stats = counter.snapshot()
    assert stats is not None
    assert stats.acceptance_per_position == (1.0, None, None)


def test_totals_report_as_many_positions_as_were_drafted() -> None:
    counter = SpeculationCounter()
    counter.add(2, 1)
    stats = counter.snapshot()
    assert stats is not None
    assert (stats.acceptance_histogram, stats.drafted_per_position) == ((0, 1, 0), (1, 1))


def test_the_identities_of_the_counts() -> None:
    rng = random.Random(1)
    counter = SpeculationCounter(7)
    for _ in range(500):
        drafted = rng.randrange(8)
        counter.add(drafted, rng.randrange(drafted + 1))
    stats = counter.snapshot()
    assert stats is not None
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps
    assert sum(a * n for a, n in enumerate(stats.acceptance_histogram)) == stats.num_accepted_draft_tokens
    assert sum(stats.accepted_per_position) == stats.num_accepted_draft_tokens
    assert sum(stats.drafted_per_position) == stats.num_draft_tokens
    assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)


@pytest.mark.parametrize(
    ("histogram", "said"),
    [([12, 0, 88, 0], "12%, 0%, 88%"), ([0, 0], "0%"), ([1, 3], "25%, 75%"), ([0, 2], "0%, 100%")],
)
def test_the_shares_of_verifies_end_with_the_largest_k_that_was_used(histogram: list[int], said: str) -> None:
    assert policy_shares(histogram) == said
