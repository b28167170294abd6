"""The cases in which acceptance is called bad: next to nothing at the first position, or far less than before."""

import pytest

from kimi_backend.spec_decode.acceptance_watch import AcceptanceWatch
from kimi_backend.types.request import SpeculationStats


class Totals:
    """The engine's, growing."""

    def __init__(self) -> None:
        self.watch = AcceptanceWatch()
        self._drafted = self._accepted = 0

    def add(self, rounds: int, share: float) -> bool:
        """Return whether the verdict has changed."""
        self._drafted += rounds
        self._accepted += round(rounds * share)
        stats = SpeculationStats(drafted_per_position=(self._drafted,), accepted_per_position=(self._accepted,))
        return self.watch.update(stats)


def test_before_any_round_nothing_is_said() -> None:
    watch = AcceptanceWatch()
    assert not watch.update(None)
    assert watch.problem is None


def test_a_draft_near_chance_is_named_after_few_rounds_and_once() -> None:
    totals = Totals()
    assert not totals.add(47, 0.0)
    assert totals.add(1, 0.0)
    assert totals.watch.problem is not None
    assert totals.watch.problem.startswith("0.0% of the first draft tokens of 48 rounds were accepted")
    assert "near chance" in totals.watch.problem
    assert not totals.add(1000, 0.05), "it is known already"
    assert totals.add(1000, 0.6)
    assert totals.watch.problem is None


def test_a_fall_far_below_its_own_past_is_named_and_one_within_it_is_not() -> None:
    totals = Totals()
    for share in (0.75, 0.7, 0.8, 0.75, 0.5):
        assert not totals.add(1000, share)
    assert totals.add(1000, 0.3)
    assert totals.watch.problem is not None and "far below its past 7" in totals.watch.problem
    assert not totals.add(1000, 0.45), "not yet back: it would flutter"
    assert totals.add(1000, 0.6)


def test_windows_are_rounds_and_the_past_is_no_part_of_them() -> None:
    totals = Totals()
    for _ in range(4):
        totals.add(1000, 0.8)
    for _ in range(9):
        assert not totals.add(100, 0.02)
    assert totals.add(100, 0.02), "the good rounds before hide nothing"


def test_a_weak_draft_that_was_always_weak_is_no_alarm() -> None:
    totals = Totals()
    assert not any(totals.add(1000, 0.2) for _ in range(6))


def test_two_windows_are_no_past() -> None:
    totals = Totals()
    assert not totals.add(48, 0.8)
    assert not totals.add(1000, 0.8)
    assert not totals.add(1000, 0.3)


def test_the_past_follows_within_some_ten_windows() -> None:
    totals = Totals()
    for share in [0.8] * 40 + [0.5] * 10:
        assert not totals.add(1000, share)
    assert not totals.add(1000, 0.33), "more than half of 0.6"
    assert totals.add(1000, 0.28)


@pytest.mark.parametrize(("num_windows", "is_named"), [(2, False), (3, True)])
def test_three_windows_are_a_past(num_windows: int, is_named: bool) -> None:
    totals = Totals()
    for _ in range(num_windows):
        assert not totals.add(1000, 0.5)
    assert totals.add(1000, 0.24) is is_named


def test_what_just_reaches_a_limit_is_not_below_it() -> None:
    assert not Totals().add(1000, 0.1)
    totals = Totals()
    for share in (0.5, 0.5, 0.5, 0.25):
        assert not totals.add(1000, share)


def test_the_first_position_is_judged() -> None:
    watch = AcceptanceWatch()
    assert not watch.update(SpeculationStats(drafted_per_position=(100, 10), accepted_per_position=(60, 0)))
    assert watch.update(SpeculationStats(drafted_per_position=(1100, 40), accepted_per_position=(61, 30)))
