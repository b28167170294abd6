import random

import numpy as np
import pytest

from kimi_backend.spec_decode.acceptance import (
    LATER_SHARE,
    PRIOR_RATE,
    AcceptancePool,
    SequenceAcceptance,
    chances,
)


def accepted(rng: random.Random, rates: list[float]) -> int:
    count = 0
    while count < len(rates) and rng.random() < rates[count]:
        count += 1
    return count


def test_rates_are_conditional_and_recent() -> None:
    rng, pool = random.Random(0), AcceptancePool()
    for rates in ([0.2, 0.2, 0.2], [0.9, 0.6, 0.3]):
        for _ in range(3000):
            pool.record(3, accepted(rng, rates))
            pool.rates()
    assert pool.rates()[:3] == pytest.approx([0.9, 0.6, 0.3], abs=0.08)
    assert 0.6 < pool.mean_rate < 0.8


def test_a_position_never_tried_takes_after_the_one_before() -> None:
    pool = AcceptancePool()
    assert pool.rates()[:2] == pytest.approx([PRIOR_RATE, LATER_SHARE * PRIOR_RATE])
    for _ in range(200):
        pool.record(1, 1)
    first, second, *_ = pool.rates()
    assert first > 0.95
    assert second == pytest.approx(LATER_SHARE * first)


def test_positions_behind_a_rejection_say_nothing() -> None:
    pool = AcceptancePool()
    for _ in range(100):
        pool.record(3, 1)
    assert pool.rates()[0] > 0.95
    assert pool.rates()[1] < 0.05
    assert pool.rates()[2] == pytest.approx(LATER_SHARE * pool.rates()[1])


def test_what_fades_falls_back_to_the_first_guess() -> None:
    pool = AcceptancePool()
    for _ in range(400):
        pool.record(1, 0)
    assert pool.rates()[0] < 0.05
    for _ in range(200):
        pool.fade(0.03)
    assert pool.rates()[0] > 0.3


def test_a_sequence_starts_as_its_kind_and_becomes_itself() -> None:
    fresh, own = SequenceAcceptance(), SequenceAcceptance()
    for _ in range(200):
        own.record(3, 0)
    assert fresh.factor(0.8) == pytest.approx(1)
    assert own.factor(0.8) < 0.35


def test_two_dozen_tokens_hardly_tell_a_sequence_from_its_kind() -> None:
    """A text is easy or hard for as many on end. One that kept half of them, where its kind keeps 0.7."""
    own = SequenceAcceptance()
    for _ in range(12):
        own.record(1, 1)
        own.record(1, 0)
    assert own.factor(0.7) == pytest.approx(0.91, abs=0.01)


def test_what_may_be_lies_above_what_was_seen_the_less_was_seen_the_more() -> None:
    """1.5 standard deviations of the share of so many tokens; a later position may be no better than one before."""
    pool = AcceptancePool()
    first, second, *_ = pool.highest_rates()
    assert first == pytest.approx(0.6 + 1.5 * (0.6 * 0.4 / 5) ** 0.5)
    assert second == pytest.approx(0.54 + 1.5 * (0.54 * 0.46 / 5) ** 0.5)
    for _ in range(12):
        pool.record(1, 0)
    seen = 0.6 * 4 / 16
    first, second, *_ = pool.highest_rates()
    assert first == pytest.approx(seen + 1.5 * (seen * (1 - seen) / 17) ** 0.5, abs=0.01)
    assert second == first


def test_the_past_counts_for_so_many_rounds_and_tokens() -> None:
    pool, own = AcceptancePool(), SequenceAcceptance()
    for _ in range(4000):
        pool.record(1, 1)
        own.record(1, 1)
        pool.rates()
    assert pool._tried[0] == pytest.approx(400, rel=0.01)
    assert own.tried == pytest.approx(150, rel=0.01)
    assert pool.rates()[0] == 0.99, "never for certain"


def test_a_sequence_may_be_no_better_than_its_kind_unless_it_was() -> None:
    worse, better = SequenceAcceptance(), SequenceAcceptance()
    for _ in range(4):
        worse.record(1, 0)
        better.record(1, 1)
    seen, highest = ([one.factor(0.5, highest=most) for one in (worse, better)] for most in (False, True))
    assert seen == pytest.approx([0.92, 1.08], abs=0.01)
    assert highest == pytest.approx([1.0, 1.08], abs=0.01)
    for _ in range(160):
        worse.record(1, 0)
    assert 0.4 < worse.factor(0.5, highest=True) < 0.6


def test_chances_fall_by_position_and_end_with_the_limit() -> None:
    rates = np.repeat([[0.5], [0.5], [0.9]], 7, axis=1)
    found = chances(rates, [1.0, 0.5, 5.0], [2, 3, 1])
    assert found[0].tolist() == [0.5, 0.25, *[0.0] * 5]
    assert found[1].tolist() == [0.25, 0.0625, 0.015625, *[0.0] * 4]
    assert 0.9 < found[2, 0] < 1 and not found[2, 1:].any()


def test_the_doubt_of_a_sequence_is_that_of_its_tokens_and_of_its_kinds_weight() -> None:
    own = SequenceAcceptance()
    own.record(4, 1)
    rate = (1 + 48 * 0.9) / (2 + 48)
    assert own.factor(0.9) == pytest.approx(rate / 0.9)
    highest = rate + 1.5 * (rate * (1 - rate) / (2 + 48 + 1)) ** 0.5
    assert own.factor(0.9, highest=True) == pytest.approx(min(highest, 0.9) / 0.9)
    for _ in range(9):
        own.record(1, 0)
    rate = (own.kept + 48 * 0.9) / (own.tried + 48)
    highest = rate + 1.5 * (rate * (1 - rate) / (11 + 48 + 1)) ** 0.5
    assert highest < 0.9
    assert own.factor(0.9, highest=True) == pytest.approx(highest / 0.9)
