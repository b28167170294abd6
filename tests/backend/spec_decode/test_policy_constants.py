"""Each constant of the policy and of its round times does something: a fourth of it, or four times as much, is seen."""

from typing import Any

import numpy as np
import pytest

from kimi_backend.spec_decode.adaptive_policy import AdaptivePolicy
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.round_times import Round, RoundTimes
from kimi_backend.spec_decode.row_choice import Batch, RowChoice
from kimi_backend.spec_decode.step_times import StepShape
from kimi_backend.types.step_costs import StepCosts
from support.made_up_costs import linear_costs

EVEN = linear_costs(1000, 0), linear_costs(600, 0, 0.001)
"""A round with one draft token takes 1.6 times as long as one without."""


def policy_of(rate: float, costs: tuple[StepCosts, StepCosts] = EVEN, num_rounds: int = 400) -> AdaptivePolicy:
    """One that has seen many draft tokens of greedy requests, one a round."""
    policy = AdaptivePolicy(*costs)
    for index in range(num_rounds):
        policy._pools[0].record(1, int((index + 1) * rate) - int(index * rate))
    return policy


def sequence(policy: AdaptivePolicy, *, uses_draft: bool, limit: int = 1) -> SpeculationController:
    controller = SpeculationController(limit, 0.0)
    controller.pool, controller.uses_draft = policy._pools[0], uses_draft
    return controller


def choose(policy: AdaptivePolicy, *controllers: SpeculationController) -> None:
    """The next choice."""
    policy._chosen_for = ()
    policy.begin_round(list(controllers), len(controllers), 64 * len(controllers))


@pytest.mark.parametrize(("rate", "comes_back"), [(0.98, True), (0.7, False)])
def test_who_comes_back_is_expected_to_be_right_less_often(rate: float, comes_back: bool) -> None:
    policy = policy_of(rate)
    away = sequence(policy, uses_draft=False)
    choose(policy, away)
    assert away.uses_draft is comes_back
    staying = sequence(policy, uses_draft=True)
    choose(policy, staying)
    assert staying.uses_draft and staying.num_chosen_tokens == 1


def test_who_came_back_is_not_judged_for_two_dozen_rounds() -> None:
    policy = policy_of(0.98)
    back = sequence(policy, uses_draft=False)
    choose(policy, back)
    for _ in range(24):
        back.record(1, 0)
    assert back.acceptance.tried == 0
    back.record(1, 0)
    assert back.acceptance.tried == 1


DEAR_CALL = linear_costs(5000, 400), linear_costs(4000, 0)
DEAR_ROWS = linear_costs(1500, 300), linear_costs(700, 10, 30)


@pytest.mark.parametrize(
    ("costs", "num_kept", "num_rounds", "num_chosen"),
    [(DEAR_CALL, 14, 25, 3), (DEAR_CALL, 6, 60, 0), (DEAR_ROWS, 1, 4, 1), (DEAR_ROWS, 1, 20, 0)],
)
def test_a_draft_is_found_out_with_as_many_tokens_as_cost_least(
    costs: tuple[StepCosts, StepCosts], num_kept: int, num_rounds: int, num_chosen: int
) -> None:
    """A little was seen, and does not pay. Where the draft's call is dear and further tokens are not, three may."""
    policy = AdaptivePolicy(*costs)
    for index in range(num_rounds):
        policy._pools[0].record(1, int(index < num_kept))
    asked = sequence(policy, uses_draft=True, limit=3)
    choose(policy, asked)
    assert asked.num_chosen_tokens == policy.num_chosen_tokens == num_chosen
    assert asked.uses_draft is (num_chosen > 0)


@pytest.mark.parametrize(("rate", "num_rounds", "stays"), [(0.57, 400, True), (0.57, 8000, False), (0.584, 8000, True)])
def test_what_was_seen_for_long_is_no_bad_luck(rate: float, num_rounds: int, stays: bool) -> None:
    """A draft that pays from 0.6 on, and is left where a round without it is 1 % faster."""
    policy = policy_of(rate, num_rounds=num_rounds)
    asked = sequence(policy, uses_draft=True)
    choose(policy, asked)
    assert asked.uses_draft is stays


def test_a_choice_stands_for_four_rounds() -> None:
    policy = policy_of(0.9)
    asked = sequence(policy, uses_draft=True)
    choices: list[RowChoice] = []
    choose_now = policy._choice

    def counted(*args: Any) -> RowChoice:
        choices.append(choose_now(*args))
        return choices[-1]

    policy._choice = counted  # type: ignore[method-assign]
    for _ in range(40):
        policy.begin_round([asked], 1, 64)
    assert 10 <= len(choices) <= 11


@pytest.mark.parametrize(("chance", "num_chosen"), [(0.25, 0), (0.45, 1)])
def test_half_of_what_others_verify_is_expected_to_be_kept(chance: float, num_chosen: int) -> None:
    """A sixth row makes the step a ninth longer. With two of the others' four kept, a third of a token pays for it."""
    policy = AdaptivePolicy(linear_costs(4000, 1000), None)
    batch = Batch(1, num_proposed=4, num_context_tokens=64, is_drafting=False, overlaps_next=False)
    assert policy.choose_looked_up(np.array([[chance, 0.0]]), batch).tolist() == [num_chosen]


@pytest.mark.parametrize(("seconds", "factor"), [(1.0, 5.0), (1e-5, 0.2)])
def test_a_factor_stays_within_bounds(seconds: float, factor: float) -> None:
    times = RoundTimes(*EVEN)
    for _ in range(400):
        plain_round(times, seconds)
    assert times.factors[0] == factor


def test_each_round_of_finding_out_is_chosen_again() -> None:
    """A choice else stands for four rounds, which is dear where the draft does not pay."""
    policy = AdaptivePolicy(*EVEN)
    asked = SpeculationController(1, 0.0)
    policy.admit(asked, [], 1, 64)
    num_rounds = 0
    while asked.uses_draft:
        policy.begin_round([asked], 1, 64)
        asked.record(1, 0)
        num_rounds += asked.uses_draft
    assert num_rounds == 4


def test_who_is_never_taken_leaves_after_a_while() -> None:
    policy = policy_of(0.98, (linear_costs(500, 500), linear_costs(100, 0, 0.001)))
    busy, idle = (sequence(policy, uses_draft=True) for _ in range(2))
    num_choices = 0
    while idle.uses_draft:
        for _ in range(20):
            idle.acceptance.record(1, 0)
        choose(policy, busy, idle)
        assert busy.num_chosen_tokens == 1
        num_choices += 1
    assert num_choices == 8


def test_what_is_known_of_a_kind_fades_with_requests_that_start_without_the_draft() -> None:
    costs = linear_costs(1000, 0), linear_costs(400, 0, 0.001)
    policy = AdaptivePolicy(*costs)
    for _ in range(100):
        policy._pools[0].record(1, 0)
    num_requests = 0
    while True:
        asked = SpeculationController(1, 0.0)
        policy.admit(asked, [], 1, 64)
        if asked.uses_draft:
            break
        num_requests += 1
    assert 40 <= num_requests <= 160


def plain_round(times: RoundTimes, seconds: float, host_s: float = 0.0) -> None:
    shape = StepShape(1, 1, 1, 64)
    done = {"target_s": seconds, "draft_s": 0.0, "draft_wait_s": 0.0, "total_s": seconds + host_s}
    times.learn(Round(target=shape, draft=None, **done, is_overlapped=False))


def test_a_first_round_that_is_held_up_turns_little() -> None:
    times = RoundTimes(*EVEN)
    plain_round(times, 0.03)
    assert 1.03 < times.factors[0] < 1.11


def test_a_round_that_is_held_up_counts_as_one_that_is_a_third_slower() -> None:
    times = RoundTimes(*EVEN)
    for _ in range(100):
        plain_round(times, 0.001)
    plain_round(times, 0.03)
    assert 1.005 < times.factors[0] < 1.02


def a_round_with_a_draft(times: RoundTimes, host_s: float, way_s: float) -> None:
    """1 ms of the target, 0.6 ms of the draft."""
    shape, behind = StepShape(1, 1, 1, 64), StepShape(1, 1, 1, 64, 1)
    times.learn(
        Round(
            target=shape,
            draft=behind,
            total_s=0.0016 + host_s + way_s,
            target_s=0.001,
            draft_s=0.0006,
            draft_wait_s=0.0006 + way_s,
            is_overlapped=False,
        )
    )


def beyond_the_steps_ms(times: RoundTimes) -> float:
    """The milliseconds that a round of one draft token is expected to take beside both steps."""
    one = np.array([1])
    return 1e3 * float(times.drafting(1, one, one, one, one * 1.0, 64)[0]) - 1.6


def test_a_first_call_of_the_draft_that_takes_long_is_not_taken_for_its_way() -> None:
    """A server's first call opens memory, here 60 ms: who then does not draft would never see that it was once."""
    times = RoundTimes(*EVEN)
    a_round_with_a_draft(times, 0.0004, 0.06)
    assert 0.6 < beyond_the_steps_ms(times) < 0.8
    for _ in range(40):
        a_round_with_a_draft(times, 0.0004, 0.0008)
    assert beyond_the_steps_ms(times) == pytest.approx(1.2, rel=0.05)


def test_the_way_to_a_draft_that_nobody_uses_is_followed_by_the_hosts_time() -> None:
    """A machine that was busy when a sequence drafted last is not taken for busy for ever."""
    times = RoundTimes(*EVEN)
    assert beyond_the_steps_ms(times) == pytest.approx(0, abs=1e-6)
    for _ in range(60):
        a_round_with_a_draft(times, 0.0008, 0.0016)
    assert beyond_the_steps_ms(times) == pytest.approx(2.4, rel=0.05)
    for _ in range(200):
        plain_round(times, 0.001, host_s=0.0004)
    assert beyond_the_steps_ms(times) == pytest.approx(1.2, rel=0.05)


def test_the_way_that_nobody_has_seen_is_half_of_the_hosts_time() -> None:
    times = RoundTimes(*EVEN)
    for _ in range(60):
        plain_round(times, 0.001, host_s=0.0004)
    assert beyond_the_steps_ms(times) == pytest.approx(0.6, rel=0.05)


def test_what_lasts_is_followed_within_some_thirty_rounds() -> None:
    times = RoundTimes(*EVEN)
    for _ in range(300):
        plain_round(times, 0.001)
    for _ in range(30):
        plain_round(times, 0.0012)
    assert 1.1 < times.factors[0] < 1.17


def test_what_moves_one_step_moves_the_others_nearly_as_much() -> None:
    """A clock is the likelier cause."""
    times = RoundTimes(*EVEN)
    for _ in range(20):
        plain_round(times, 0.0012)
    moved = np.array(times.factors) - 1
    assert 0.8 < moved[2] / moved[0] < 0.93


def test_those_look_up_alike_whose_prompts_repeat_alike() -> None:
    policy = AdaptivePolicy(linear_costs(1000, 0), linear_costs(100, 0, 10))
    controllers = [SpeculationController(4, temperature) for temperature in (0.0, 0.0, 0.0, 1.0)]
    for controller, repetition in zip(controllers, (0, 2, 2, 2), strict=True):
        controller.repetition = repetition
        policy.admit(controller, [], 1, 64)
    kinds = [controller.looked_up.kind for controller in controllers]
    assert len(set(map(id, kinds))) == 3
    assert kinds[1] is kinds[2] is not None


def test_what_takes_no_time_teaches_nothing() -> None:
    times = RoundTimes(linear_costs(0, 0), None)
    plain_round(times, 0.001)
    assert times.factors == [1, 1, 1]


@pytest.mark.parametrize(("host_s", "beside_s"), [(0.0002, 0.0006), (0.0009, 0.0009)])
def test_beside_a_hidden_host_a_round_waits_for_the_longer_of_it_and_the_draft(host_s: float, beside_s: float) -> None:
    times = RoundTimes(*EVEN)
    a_round_with_a_draft(times, 0.0, 0.0)
    times.assume_overlapped(host_s)
    assert times.is_overlapped
    one = np.array([1])
    found = times.verifying(1, one, one, 64, is_drafting=True, overlaps_next=False)
    assert found == pytest.approx([0.001 + beside_s], rel=1e-3)


@pytest.mark.parametrize(("depth", "target_us"), [(1, 1800), (2, 2600), (3, 2600), (4, 4200)])
def test_a_round_has_the_rows_of_the_bucket_that_its_depth_needs(depth: int, target_us: float) -> None:
    """One of four sequences drafts one token; a captured step takes as long as one with all rows of its bucket."""
    times = RoundTimes(linear_costs(1000, 100, is_captured=True), linear_costs(0, 0, 1e-6, is_captured=True))
    found = times.drafting(4, 1, depth, 1, np.float64(1), 4 * 64)
    assert 1e6 * float(found) == pytest.approx(target_us, rel=1e-3)


@pytest.mark.parametrize(("is_overlapped", "depth", "draft_us"), [(False, 1, 1100), (True, 1, 1400), (True, 3, 3400)])
def test_a_draft_behind_a_verify_that_nobody_waits_for_has_the_rows_of_a_bucket(
    is_overlapped: bool, depth: int, draft_us: float
) -> None:
    """The five rows of four sequences, or all of a bucket; each proposal but the first takes 0.6 ms."""
    times = RoundTimes(linear_costs(0, 0, is_captured=True), linear_costs(600, 100, 1e-6, is_captured=True))
    if is_overlapped:
        times.assume_overlapped()
    assert 1e6 * float(times.drafting(4, 4, depth, 1, np.float64(1), 4 * 64)) == pytest.approx(draft_us, rel=1e-3)


def test_a_round_of_more_sequences_than_were_measured_teaches_too() -> None:
    times = RoundTimes(*EVEN)
    shape = StepShape(300, 300, 1, 64 * 300)
    times.learn(
        Round(
            target=shape,
            draft=None,
            total_s=0.01,
            target_s=0.01,
            draft_s=0.0,
            draft_wait_s=0.0,
            is_overlapped=False,
        )
    )
    assert times.factors[0] > 1
