import random

import pytest

from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.draft_sampling import KEEP_POSITIONS, TRIAL_POSITIONS
from kimi_backend.types.request import DraftSampling


@pytest.mark.parametrize(
    ("k", "remaining", "wanted"), [(3, 100, 3), (3, 4, 3), (3, 3, 2), (3, 2, 1), (3, 1, 0), (3, 0, 0), (0, 100, 0)]
)
def test_no_more_is_drafted_than_can_be_used(k: int, remaining: int, wanted: int) -> None:
    assert SpeculationController(k, DraftSampling.COUPLED).num_draft_tokens(remaining) == wanted


@pytest.mark.parametrize("choice", [DraftSampling.COUPLED, DraftSampling.GREEDY])
def test_a_fixed_choice_stays(choice: DraftSampling) -> None:
    controller = SpeculationController(3, choice)
    for _ in range(1000):
        controller.record(3, 0)
        assert controller.is_greedy == (choice is DraftSampling.GREEDY)


def shares(rates: dict[bool, float], num_rounds: int = 4000) -> float:
    """Share of rounds that `auto` guesses greedily when coupled and greedy guesses are accepted at these rates."""
    rng = random.Random(0)
    controller = SpeculationController(3, DraftSampling.AUTO)
    num_greedy = 0
    for _ in range(num_rounds):
        rate = rates[controller.is_greedy]
        num_greedy += controller.is_greedy
        accepted = 0
        while accepted < 3 and rng.random() < rate:
            accepted += 1
        controller.record(3, accepted)
    return num_greedy / num_rounds


def test_auto_begins_coupled_and_stays_while_the_draft_is_good() -> None:
    assert shares({False: 0.85, True: 0.72}) == 0.0


def test_auto_goes_greedy_when_that_is_accepted_more() -> None:
    assert shares({False: 0.3, True: 0.5}) > 0.7


def test_auto_stays_mostly_coupled_when_greedy_is_worse() -> None:
    assert shares({False: 0.5, True: 0.3}) < 0.25


def test_auto_comes_back_when_the_draft_gets_better() -> None:
    controller = SpeculationController(1, DraftSampling.AUTO)
    for _ in range(TRIAL_POSITIONS):
        controller.record(1, 0)
    assert controller.is_greedy
    for _ in range(TRIAL_POSITIONS + KEEP_POSITIONS):
        assert controller.is_greedy
        controller.record(1, 1)
    assert not controller.is_greedy, "coupled is measured again"
    for _ in range(10 * TRIAL_POSITIONS):
        controller.record(1, 1)
        assert not controller.is_greedy


def test_positions_behind_a_rejection_do_not_count() -> None:
    controller = SpeculationController(7, DraftSampling.AUTO)
    for _ in range(TRIAL_POSITIONS - 1):
        controller.record(7, 0)  # one verified position a round, six never looked at
    assert not controller.is_greedy
    controller.record(7, 0)
    assert controller.is_greedy
