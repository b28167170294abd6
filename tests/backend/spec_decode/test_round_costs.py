import math
import random

import pytest

from kimi_backend.spec_decode.round_costs import (
    COMPARED_ROUNDS,
    FIRST_DOUBT,
    FIRST_STEP,
    FOLLOWING,
    FOLLOWING_AHEAD_DOUBT,
    FOLLOWING_DOUBT,
    LONGEST_GAP,
    NEXT_STEP,
    RoundCosts,
)

FIRST_GUESS = [0.0, FIRST_STEP, FIRST_STEP + NEXT_STEP, FIRST_STEP + 2 * NEXT_STEP]


def measure(costs: RoundCosts, num_sequences: int, k: int, seconds: float, count: int = 4) -> None:
    for _ in range(count):
        costs.record(num_sequences, k, seconds)


def alternate(costs: RoundCosts, k: int, times: tuple[float, float], count: int = 6, num_sequences: int = 1) -> None:
    """Between no draft and k."""
    for _ in range(count):
        measure(costs, num_sequences, 0, times[0])
        measure(costs, num_sequences, k, times[1])


def test_nothing_is_known_at_first() -> None:
    costs = RoundCosts()
    measure(costs, 1, 3, 0.0)
    measure(costs, 1, 2, 1.0)
    assert costs.ratios(1).log_ratio[:4] == pytest.approx(FIRST_GUESS)
    assert costs.ratios(1).doubt[1] == pytest.approx(FIRST_DOUBT)
    assert costs.ratios(1).doubt[0] == 0


def test_neighbours_in_time_are_compared() -> None:
    costs = RoundCosts()
    alternate(costs, 3, (1.0, 2.0))
    known = costs.ratios(1)
    assert known.times[0] == 1
    assert known.times[3] == pytest.approx(2.0, rel=0.02)
    assert known.doubt[3] < 0.05 < known.doubt[1]
    assert 1 < known.times[1] < known.times[2] < known.times[3] < known.times[4]


def test_two_numbers_are_known_by_way_of_a_third() -> None:
    costs = RoundCosts()
    alternate(costs, 3, (1.0, 2.0))
    for _ in range(6):
        measure(costs, 1, 3, 2.0)
        measure(costs, 1, 2, 1.5)
    assert costs.ratios(1).times[2] == pytest.approx(1.5, rel=0.03)
    assert costs.ratios(1).doubt[2] < 0.06


@pytest.mark.parametrize("seed", range(5))
def test_what_moves_all_moves_nothing(seed: int) -> None:
    """The machine takes up to four times as long for a while, in spells that do not know of the visits."""
    rng, costs, slowness, left = random.Random(seed), RoundCosts(), 1.0, 0
    for index in range(1500):
        if not left:
            slowness, left = rng.choice((1.0, 2.0, 4.0)), rng.randint(10, 150)
        left -= 1
        k = 0 if index % 30 < 4 else 3
        costs.record(1, k, (2.0 if k else 1.0) * slowness * rng.lognormvariate(0, 0.1))
    known = costs.ratios(1)
    assert known.times[3] == pytest.approx(2.0, rel=0.08)
    assert abs(known.log_ratio[3] - math.log(2)) < 4 * known.doubt[3]


def test_doubt_says_how_far_off_it_is() -> None:
    """In units of its doubt, the error scatters by about one."""
    errors = []
    for seed in range(40):
        rng, costs = random.Random(seed), RoundCosts()
        for index in range(400):
            k = 0 if index % 12 < 4 else 3
            costs.record(1, k, (2.0 if k else 1.0) * rng.lognormvariate(0, 0.4))
        known = costs.ratios(1)
        errors.append((known.log_ratio[3] - math.log(2)) / known.doubt[3])
    assert 0.5 < math.sqrt(sum(error**2 for error in errors) / len(errors)) < 1.3


def test_rounds_far_apart_are_not_compared() -> None:
    costs = RoundCosts()
    measure(costs, 1, 3, 2.0)
    for _ in range(LONGEST_GAP + 1):
        costs.pass_round()
    measure(costs, 1, 0, 1.0, count=COMPARED_ROUNDS)
    assert costs.num_changes(1, 0) == 0
    measure(costs, 1, 3, 2.0, count=COMPARED_ROUNDS)
    assert costs.num_changes(1, 0) == 1


def test_rounds_of_another_size_are_not_compared() -> None:
    costs = RoundCosts()
    measure(costs, 1, 0, 1.0)
    measure(costs, 8, 3, 9.0, count=COMPARED_ROUNDS)
    assert costs.num_changes(1, 0) == costs.num_changes(8, 3) == 0


def test_another_size_is_guessed_from_the_nearest_until_it_is_measured() -> None:
    costs = RoundCosts()
    alternate(costs, 3, (1.0, 1.5))
    alternate(costs, 3, (1.0, 3.0), num_sequences=32)
    assert costs.ratios(2).times[3] == pytest.approx(1.5, rel=0.05)
    assert costs.ratios(16).times[3] == pytest.approx(3.0, rel=0.05)
    assert costs.ratios(2).doubt[3] > costs.ratios(1).doubt[3]
    alternate(costs, 3, (1.0, 2.0), num_sequences=2)
    assert costs.ratios(2).times[3] == pytest.approx(2.0, rel=0.05)


def test_a_round_in_which_few_draft_counts_as_if_all_did() -> None:
    costs = RoundCosts()
    for _ in range(6):
        measure(costs, 4, 0, 1.0)
        for _ in range(4):
            costs.record(4, 3, 1.6, share=0.6)
    assert costs.ratios(4).times[3] == pytest.approx(2.0, rel=0.05)


def test_one_long_round_changes_little() -> None:
    costs = RoundCosts()
    alternate(costs, 3, (1.0, 2.0))
    measure(costs, 1, 0, 1.0, count=3)
    costs.record(1, 0, 100.0)
    measure(costs, 1, 3, 2.0)
    assert costs.ratios(1).times[3] == pytest.approx(2.0, rel=0.12)


def test_what_is_forgotten_makes_room() -> None:
    costs = RoundCosts()
    alternate(costs, 3, (1.0, 2.0), count=30)
    sure = costs.ratios(1).doubt[3]
    costs.forget(1, 4)
    assert costs.ratios(1).doubt[3] > sure
    alternate(costs, 3, (1.0, 1.2), count=10)
    assert costs.ratios(1).times[3] == pytest.approx(1.3, rel=0.1)


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_a_draft_that_only_follows_stands_for_none_until_none_was_seen(launches_ahead: bool) -> None:
    costs = RoundCosts()
    costs.launches_ahead = launches_ahead
    for _ in range(10):
        measure(costs, 1, FOLLOWING, 1.0)
        measure(costs, 1, 3, 2.0)
    guessed = costs.ratios(1)
    assert guessed.times[3] == pytest.approx(2.0, rel=0.08)
    assert guessed.doubt[3] > (0.9 * FOLLOWING_AHEAD_DOUBT if launches_ahead else FOLLOWING_DOUBT)
    assert guessed.doubt_of_following == pytest.approx(
        FOLLOWING_AHEAD_DOUBT if launches_ahead else FOLLOWING_DOUBT, rel=0.1
    )
    for _ in range(10):
        measure(costs, 1, 0, 0.8)
        measure(costs, 1, 3, 2.0)
    if launches_ahead:
        assert costs.ratios(1).times[3] == pytest.approx(2.5, rel=0.03)
    assert costs.ratios(1).doubt_of_following < guessed.doubt_of_following


def test_numbers_are_surer_beside_each_other_than_beside_no_draft() -> None:
    costs = RoundCosts()
    for _ in range(10):
        measure(costs, 1, 2, 1.8)
        measure(costs, 1, 3, 2.0)
    known = costs.ratios(1)
    assert known.doubt_between(2, 3) < 0.03 < known.doubt[2]
