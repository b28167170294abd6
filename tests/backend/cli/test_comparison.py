"""Verdicts of a comparison: a difference is seen through noise, and noise alone is not called a difference."""

import random

import pytest

from kimi_backend.cli.comparison import MAX_PAIRS, MIN_PAIRS, Comparison, Verdict, compare, spread


def noisy(seed: int, speeds: dict[str, float], noise: float):
    """Speeds with log-normal noise, and now and then a run that something else stalled."""
    source = random.Random(seed)

    def measure(side: str) -> float:
        stalled = 0.3 if source.random() < 0.1 else 1.0
        return speeds[side] * source.lognormvariate(0, noise) * stalled

    return measure


@pytest.mark.parametrize(("speculative", "verdict"), [(133.0, Verdict.FASTER), (75.0, Verdict.SLOWER)])
def test_a_difference_of_a_third_is_seen_through_the_noise(speculative: float, verdict: Verdict) -> None:
    speeds = {"speculative": speculative, "plain": 100.0}
    verdicts = [compare(noisy(seed, speeds, 0.1), limit_s=1e9).verdict for seed in range(100)]
    assert verdicts.count(verdict) >= 97
    assert verdicts.count(verdict) + verdicts.count(Verdict.UNDECIDED) == 100


def test_noise_alone_is_not_called_a_difference() -> None:
    speeds = {"speculative": 100.0, "plain": 100.0}
    verdicts = [compare(noisy(seed, speeds, 0.2), limit_s=1e9).verdict for seed in range(200)]
    wrong = verdicts.count(Verdict.FASTER) + verdicts.count(Verdict.SLOWER)
    assert wrong <= 14  # looking after each pair costs some of the 99 %


def test_a_load_that_comes_in_the_middle_falls_on_both_sides() -> None:
    calls: list[str] = []

    def measure(side: str) -> float:
        calls.append(side)
        return (120.0 if side == "speculative" else 100.0) / (3.0 if len(calls) > 7 else 1.0)

    result = compare(measure, limit_s=1e9)
    assert calls[:4] == ["speculative", "plain", "plain", "speculative"]
    assert (result.verdict, len(result.plain)) == (Verdict.FASTER, 12)  # one pair may lie outside
    assert result.speedup.median == pytest.approx(1.2)


def test_equal_speeds_are_called_so_and_a_weak_difference_runs_to_the_limit() -> None:
    same = compare(lambda side: 99.0 if side == "plain" else 100.0, limit_s=1e9)
    assert (same.verdict, len(same.plain)) == (Verdict.SAME, MIN_PAIRS)
    weak = compare(noisy(3, {"speculative": 100.0, "plain": 100.0}, 0.3), limit_s=1e9)
    assert weak.verdict is Verdict.UNDECIDED
    assert len(weak.plain) == MAX_PAIRS
    assert "smaller than this machine's noise" in weak.sentence()
    ticks = iter(range(1000))
    cut = compare(noisy(3, {"speculative": 100.0, "plain": 100.0}, 0.3), limit_s=10, clock=lambda: next(ticks))
    assert MIN_PAIRS < len(cut.plain) < MAX_PAIRS


def test_few_pairs_are_no_verdict() -> None:
    few = compare(lambda side: 1.0 if side == "plain" else 9.0, min_pairs=2, limit_s=1e9)
    assert (len(few.plain), few.verdict) == (2, Verdict.UNDECIDED)
    assert "fewer than" in few.sentence()


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    source = random.Random(0)
    for number in (8, 15, 32):
        held = 0
        for _ in range(2000):
            found = spread([source.expovariate(1) for _ in range(number)])
            held += found.low <= 0.6931 <= found.high
        assert held / 2000 > 0.984
    assert spread([3.0]).low == 3.0


def test_json_has_both_sides() -> None:
    report = Comparison((2.0,) * 8, (1.0,) * 8).as_json()
    assert report["verdict"] == "faster"
    assert report["speedup"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert report["tokens_per_second"]["plain"]["median"] == 1.0
