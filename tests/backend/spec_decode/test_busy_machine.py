"""On a machine that other programs keep busy, the adaptive policy still drafts where that gains and not where it loses.

Costs and acceptance are as measured, rounds vary by formula or as recorded, and everything follows from a seed.
"""

from statistics import fmean

import pytest

from kimi_backend.spec_decode.adaptive_policy import AdaptivePolicy
from support.served_rounds import CASES, NOISES, NUM_LEARNING, ServedRounds

NUM_SEEDS = 6
NUM_ROUNDS = 2400


def serve(case: str, noise: str, num_sequences: int) -> tuple[list[float], list[float]]:
    """(share of the better of no draft and the best fixed k, share of rounds that draft), one entry a seed."""
    best = max(CASES[case].tokens_per_ms(k, num_sequences) for k in range(4))
    shares, drafting = [], []
    for seed in range(NUM_SEEDS):
        served = ServedRounds(AdaptivePolicy(), CASES[case], noise, seed, num_sequences)
        shares.append(served.serve(NUM_ROUNDS) / best)
        late = served.rounds[NUM_LEARNING:]
        drafting.append(sum(k > 0 for k in late) / len(late))
    return shares, drafting


@pytest.mark.parametrize("num_sequences", [1, 8])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("case", "most_left"), [("gains half", 0), ("gains a quarter", 1)])
def test_a_draft_that_gains_is_not_left(case: str, most_left: int, noise: str, num_sequences: int) -> None:
    """Of a quarter's gain rounds of a busy machine say otherwise at times, in up to 8 % of all seeds."""
    shares, drafting = serve(case, noise, num_sequences)
    assert sum(share <= 0.9 for share in drafting) <= most_left
    assert fmean(shares) > 0.965 - 0.015 * most_left
    assert sorted(shares)[most_left] > 0.94


@pytest.mark.parametrize("num_sequences", [1, 8])
@pytest.mark.parametrize("noise", NOISES)
def test_a_draft_that_loses_is_left(noise: str, num_sequences: int) -> None:
    shares, drafting = serve("loses a sixth", noise, num_sequences)
    assert fmean(drafting) < 0.1
    assert fmean(shares) > 0.965
    assert min(shares) > 0.9


@pytest.mark.parametrize("num_sequences", [1, 8])
@pytest.mark.parametrize(("case", "drafts"), [("gains a quarter ahead", True), ("loses a tenth ahead", False)])
def test_rounds_that_are_launched_ahead_without_a_draft_are_seen_to_be_faster(
    case: str, drafts: bool, num_sequences: int
) -> None:
    """A round whose draft only follows takes a fifth longer than one without a draft, so it is left for a while."""
    shares, drafting = serve(case, "quiet", num_sequences)
    assert min(shares) > 0.955
    assert min(drafting) > 0.9 if drafts else max(drafting) < 0.2


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_where_only_leaving_the_draft_tells_it_is_left_soon(num_sequences: int) -> None:
    """Rounds whose draft only follows are no faster there than those that draft, and say nothing of those without."""
    for seed in range(NUM_SEEDS):
        policy = AdaptivePolicy()
        served = ServedRounds(policy, CASES["loses a third ahead"], "quiet", seed, num_sequences)
        served.serve(100)
        (book,) = policy._visits.values()
        assert book.num_checks <= 4
        assert book.num_rounds < 60, "rounds in which somebody had a draft"


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("case", ["gains a twelfth", "loses a twelfth"])
def test_what_is_close_to_call_costs_little_either_way(case: str, noise: str) -> None:
    """Seven per cent are at stake; mostly it finds out."""
    shares, _ = serve(case, noise, 1)
    assert fmean(shares) > 0.955
    assert min(shares) > 0.91


def test_what_it_does_follows_from_the_seed() -> None:
    assert serve("loses a sixth", "recorded", 1) == serve("loses a sixth", "recorded", 1)
