import random

import pytest

from kimi_backend.spec_decode.round_costs import DEFAULT_STEP, RoundCosts


def test_nothing_is_known_at_first() -> None:
    costs = RoundCosts()
    assert costs.estimates(1) is None
    costs.record(1, 3, 0.0)
    assert costs.estimates(1) is None, "a clock that stands still teaches nothing"
    assert costs.age(1, 3) == float("inf")


def test_the_first_value_is_a_median() -> None:
    costs = RoundCosts()
    for seconds in (5.0, 1.0, 1.1):
        assert not costs.is_known(1, 3)
        costs.record(1, 3, seconds)
    estimates = costs.estimates(1)
    assert estimates is not None
    assert estimates[3] == pytest.approx(1.1)
    assert estimates[2] == pytest.approx(1.1 * (1 + 2 * DEFAULT_STEP) / (1 + 3 * DEFAULT_STEP))


def measure(costs: RoundCosts, num_sequences: int, k: int, seconds: float, count: int = 8) -> None:
    for _ in range(count):
        costs.record(num_sequences, k, seconds)


def test_between_and_beyond_what_was_measured_lie_straight_lines() -> None:
    costs = RoundCosts()
    measure(costs, 1, 0, 1.0)
    measure(costs, 1, 2, 1.4)
    assert costs.estimates(1)[:5] == pytest.approx([1.0, 1.2, 1.4, 1.6, 1.8], rel=0.02)  # type: ignore[index]
    measure(costs, 1, 3, 1.3)
    estimates = costs.estimates(1)
    assert estimates is not None
    assert estimates[4] >= estimates[3], "more tokens are never taken for cheaper where it was not seen"


def test_another_number_of_sequences_takes_the_shape_of_the_nearest() -> None:
    costs = RoundCosts()
    measure(costs, 1, 0, 1.0)
    measure(costs, 1, 3, 2.0)
    measure(costs, 8, 3, 4.0)
    estimates = costs.estimates(8)
    assert estimates is not None
    assert estimates[0] / estimates[3] == pytest.approx(0.5, rel=0.1)
    assert not costs.is_known(8, 0)
    assert costs.doubt(8, 0) > 0


def test_sizes_between_powers_of_two_are_told_apart() -> None:
    costs = RoundCosts()
    for num_sequences in (4, 8, 16):
        measure(costs, num_sequences, 0, float(num_sequences))
    assert costs.estimates(10)[0] == pytest.approx(10, rel=0.1)  # type: ignore[index]
    assert costs.estimates(6)[0] == pytest.approx(6, rel=0.1)  # type: ignore[index]


def test_what_moves_all_moves_what_was_not_measured_since() -> None:
    rng, costs = random.Random(0), RoundCosts()
    measure(costs, 1, 0, 1.0)
    measure(costs, 1, 3, 2.0)
    for _ in range(200):  # the machine becomes half as fast, seen with k = 3 alone
        costs.record(1, 3, 4.0 * rng.lognormvariate(0, 0.05))
    estimates = costs.estimates(1)
    assert estimates is not None
    assert estimates[3] == pytest.approx(4.0, rel=0.1)
    assert estimates[0] == pytest.approx(2.0, rel=0.15)
    assert costs.doubt(1, 0) > 0.15, "but that is not certain"


def test_one_long_round_counts_as_a_little_longer() -> None:
    costs = RoundCosts()
    measure(costs, 1, 0, 1.0, count=50)
    costs.record(1, 0, 100.0)
    assert costs.estimates(1)[0] < 1.12  # type: ignore[index]


def test_a_proxy_gives_way_to_the_real_thing() -> None:
    costs = RoundCosts()
    for _ in range(5):
        costs.record(1, 0, 1.0, is_proxy=True)
    assert costs.is_proxy(1, 0)
    measure(costs, 1, 0, 0.8)
    assert not costs.is_proxy(1, 0)
    assert costs.estimates(1)[0] == pytest.approx(0.8, rel=0.05)  # type: ignore[index]
    costs.record(1, 0, 0.9, is_proxy=True)
    assert not costs.is_proxy(1, 0)
    assert costs.doubt(1, 0) > 0
