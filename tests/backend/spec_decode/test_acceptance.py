import random

import pytest

from kimi_backend.spec_decode.acceptance import FIRST_GUESS, AcceptancePool, SequenceAcceptance, gains


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
    assert pool.rates() == [FIRST_GUESS] * 7
    for _ in range(200):
        pool.record(1, 1)
    first, second, *_ = pool.rates()
    assert first > 0.95
    assert second == pytest.approx(first)


def test_positions_behind_a_rejection_say_nothing() -> None:
    pool = AcceptancePool()
    for _ in range(100):
        pool.record(3, 1)
    assert pool.rates()[0] > 0.95
    assert pool.rates()[1] < 0.05
    assert pool.rates()[2] == pytest.approx(pool.rates()[1])
    assert pool.num_accepted == 100


def test_what_is_forgotten_makes_room() -> None:
    pool = AcceptancePool()
    for _ in range(400):
        pool.record(1, 0)
    pool.forget(10)
    for _ in range(20):
        pool.record(1, 1)
    assert pool.rates()[0] > 0.6


def test_a_sequence_starts_as_its_kind_and_becomes_itself() -> None:
    own = SequenceAcceptance()
    assert own.factor(0.8) == pytest.approx(1)
    for _ in range(40):
        own.record(3, 0)
    assert own.factor(0.8) < 0.35
    own.forget()
    assert own.factor(0.8) == pytest.approx(1)


def test_gains_add_up_what_is_reached() -> None:
    assert gains([0.5, 0.5, 0.5], 1.0, 2) == [0.0, 0.5, 0.75]
    assert gains([0.5, 0.5], 0.5, 1) == [0.0, 0.25]
    assert gains([0.9], 5.0, 1)[1] < 1
