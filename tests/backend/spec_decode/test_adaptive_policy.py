"""The policy on a machine that its table knows well, badly, and not at all any more: simulated rounds."""

import functools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kimi_backend.spec_decode.adaptive_policy import ROUNDS_A_CHOICE, AdaptivePolicy
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.round_times import Round, RoundTimes
from kimi_backend.spec_decode.step_times import StepShape
from kimi_backend.types.step_costs import StepCosts
from support.made_up_costs import SIZES, linear_costs

GOOD, FAIR, BAD, HOPELESS = (0.85, 0.67, 0.48), (0.7, 0.5, 0.4), (0.3, 0.2, 0.1), (0.05, 0.05, 0.05)
HOST_S, WAY_S = 0.0004, 0.0003


@dataclass
class Machine:
    """Rounds of some sequences, which each verify what was drafted for them in the round before."""

    target: StepCosts
    draft: StepCosts
    is_overlapped: bool = False
    noise: float = 0.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    num_tokens: float = 0
    seconds: float = 0
    by_k: list[int] = field(default_factory=lambda: [0] * 8)

    def __post_init__(self) -> None:
        self.true = RoundTimes(self.target, self.draft)

    def run(
        self, policy: AdaptivePolicy | int, rates: list[tuple[float, ...]], num_rounds: int, temperature: float = 0.0
    ) -> float:
        """Tokens a second. policy: or a fixed k."""
        own = [SpeculationController(7, temperature) for _ in rates]
        self.num_tokens = self.seconds = 0
        self.by_k = [0] * 8
        if isinstance(policy, AdaptivePolicy):
            for index, controller in enumerate(own):
                policy.admit(controller, own[:index], len(own), 64 * len(own))
        for _ in range(num_rounds):
            if isinstance(policy, AdaptivePolicy):
                policy.begin_round(own, len(own), 64 * len(own))
                counts = [c.num_chosen_tokens if c.uses_draft else 0 for c in own]
            else:
                counts = [policy] * len(own)
            self._round(policy, own, rates, counts)
        return self.num_tokens / self.seconds

    def _round(
        self,
        policy: AdaptivePolicy | int,
        own: list[SpeculationController],
        rates: list[tuple[float, ...]],
        counts: list[int],
    ) -> None:
        accepted = [self._accepted(rate, count) for rate, count in zip(rates, counts, strict=True)]
        for controller, count, kept in zip(own, counts, accepted, strict=True):
            self.by_k[count] += 1
            if count:
                controller.record(count, kept)
        num_seqs, num_rows, depth = len(own), len(own) + sum(counts), max(counts)
        num_drafting = sum(c.uses_draft for c in own) if isinstance(policy, AdaptivePolicy) else num_seqs * (depth > 0)
        target = StepShape(num_seqs, num_rows, depth + 1, 64 * num_seqs)
        target_s = float(sum(self.true._target.fixed_and_variable(num_seqs, num_rows, depth + 1, 64)))
        draft_s, draft = 0.0, None
        target_s *= self._noise()
        if num_drafting:
            rows = num_drafting + sum(counts if self.is_overlapped else accepted)
            draft = StepShape(num_drafting, rows, depth + 1, 64 * num_drafting, depth)
            self.true._is_overlapped = self.is_overlapped
            draft_s = float(self.true._draft_step(num_drafting, rows, depth, 64)) * self._noise()
        total_s = target_s + draft_s + HOST_S + WAY_S * (draft is not None)
        if self.is_overlapped:
            total_s = target_s + max(draft_s, HOST_S) if draft else max(target_s, HOST_S)
        self.num_tokens += num_seqs + sum(map(expected, rates, counts))
        self.seconds += total_s
        if isinstance(policy, AdaptivePolicy):
            waited_s = total_s - HOST_S if self.is_overlapped else target_s
            wait_s = draft_s + WAY_S if draft and not self.is_overlapped else 0.0
            policy.end_round(
                Round(
                    target=target,
                    draft=draft,
                    total_s=total_s,
                    target_s=waited_s,
                    draft_s=0.0 if self.is_overlapped else draft_s,
                    draft_wait_s=wait_s,
                    is_overlapped=self.is_overlapped,
                )
            )

    def _noise(self) -> float:
        return float(np.exp(self.rng.normal(0, self.noise)))

    def _accepted(self, rates: tuple[float, ...], count: int) -> int:
        kept = 0
        while kept < count and self.rng.random() < rate_at(rates, kept):
            kept += 1
        return kept


def rate_at(rates: tuple[float, ...], place: int) -> float:
    """The probability that a draft token is kept when all before it were."""
    return rates[place] if place < len(rates) else rates[-1] * 0.71 ** (place - len(rates) + 1)


@functools.cache
def expected(rates: tuple[float, ...], count: int) -> float:
    """The mean number of draft tokens kept of so many."""
    return float(np.cumprod([rate_at(rates, place) for place in range(count)]).sum())


CHEAP = linear_costs(3000, 40), linear_costs(100, 5, 10)
SLICE = linear_costs(1500, 300), linear_costs(700, 10, 30)
TINY = linear_costs(1500, 250), linear_costs(500, 60, 60)


def best_fixed(machine: Machine, rates: list[tuple[float, ...]]) -> tuple[float, float]:
    """Tokens a second of the best k, and of none."""
    speeds = [machine.run(k, rates, 30) for k in range(8)]
    return max(speeds), speeds[0]


@pytest.mark.parametrize(
    ("num_seqs", "costs", "rates", "is_overlapped"),
    [
        (num_seqs, costs, rates, (few + place + other) % 2 == 0)  # every pair of any two of the four
        for few, num_seqs in enumerate((32, 1))
        for place, costs in enumerate((CHEAP, SLICE, TINY))
        for other, rates in enumerate((GOOD, FAIR, BAD))
    ],
)
def test_it_is_as_fast_as_the_best_fixed_k_from_the_first_request(
    num_seqs: int, costs: tuple[StepCosts, StepCosts], rates: tuple[float, ...], is_overlapped: bool
) -> None:
    """Bad luck at the start counts once, and is one start's: few sequences begin six times."""
    machine = Machine(*costs, is_overlapped)
    everyone = [rates] * num_seqs
    best, _ = best_fixed(machine, everyone)
    few = num_seqs == 1
    shares = []
    for seed in range(6 if few else 1):
        machine.rng, policy = np.random.default_rng(seed), AdaptivePolicy(*costs)
        shares.append(machine.run(policy, everyone, 400 if few else 150) / best)
        assert machine.run(policy, everyone, 100 if few else 50) >= 0.98 * best, machine.by_k
    assert np.mean(shares) >= 0.97 and min(shares) >= 0.95, shares


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("costs", [CHEAP, SLICE, TINY])
@pytest.mark.parametrize(("num_seqs", "num_rounds", "num_starts"), [(1, 450, 4), (64, 150, 1)])
def test_a_draft_that_is_hardly_ever_right_costs_little(
    num_seqs: int, num_rounds: int, num_starts: int, costs: tuple[StepCosts, StepCosts], is_overlapped: bool
) -> None:
    """Finding out included: from the first request of a server that has seen nothing."""
    machine = Machine(*costs, is_overlapped)
    everyone = [HOPELESS] * num_seqs
    plain, shares = machine.run(0, everyone, 3), []
    for seed in range(num_starts):
        machine.rng = np.random.default_rng(seed)
        shares.append(machine.run(AdaptivePolicy(*costs), everyone, num_rounds) / plain)
    assert np.mean(shares) >= 0.98 and min(shares) >= 0.97, (shares, machine.by_k)


def test_a_draft_that_began_badly_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """kimi-nano at a server's first start on a CPU: of the first 25 tokens 14 were kept, which does not pay, while
    every round is slow."""
    monkeypatch.setitem(globals(), "HOST_S", 0.00145)
    monkeypatch.setitem(globals(), "WAY_S", 0.00245)
    target, draft = linear_costs(4900, 875), linear_costs(865, 60, 440)
    costs = target, replace(draft, proposals_us=(tuple(440.0 + 760 * k for k in range(7)),) * len(SIZES))
    machine, policy = Machine(*costs), AdaptivePolicy(*costs)
    step, behind = StepShape(1, 2, 2, 64), StepShape(1, 2, 2, 64, 1)
    target_s, draft_s = 0.00665, 0.001425
    times = {"total_s": target_s + draft_s + HOST_S + WAY_S, "target_s": target_s, "draft_s": draft_s}
    for _ in range(40):
        policy.end_round(Round(target=step, draft=behind, **times, draft_wait_s=draft_s + WAY_S, is_overlapped=False))
    for kept in [1] * 14 + [0] * 11:
        policy._pools[0].record(1, kept)
    rates = [(0.74, 0.7, 0.68)]
    best, plain = best_fixed(machine, rates)
    assert best > 1.2 * plain
    machine.run(policy, rates, 60)
    assert machine.run(policy, rates, 200) >= 0.95 * best, machine.by_k


@pytest.mark.parametrize(
    ("wrong", "is_overlapped"),
    [
        ((1.3, 1.0), False),
        ((0.7, 1.0), False),
        ((1.0, 1.3), False),
        ((1.0, 0.7), False),
        ((1.3, 1.3), True),
        ((0.7, 0.7), True),
    ],
)
def test_a_table_that_is_wrong_recovers(wrong: tuple[float, float], is_overlapped: bool) -> None:
    """One model alone where each time is known, both where only the whole round's is."""
    machine = Machine(*SLICE, is_overlapped, noise=0.05)
    everyone = [FAIR] * 4
    best, plain = best_fixed(machine, everyone)
    believed = [
        linear_costs(1500 * wrong[0], 300 * wrong[0]),
        linear_costs(700 * wrong[1], 10 * wrong[1], 30 * wrong[1]),
    ]
    policy = AdaptivePolicy(*believed)
    machine.run(policy, everyone, 100)
    assert machine.run(policy, everyone, 600) >= 0.97 * max(best, plain), (machine.by_k, policy.times.factors)


def test_experts_that_overlap_make_rows_cheaper_than_the_table() -> None:
    machine = Machine(linear_costs(1500, 100), linear_costs(300, 10, 30))
    policy = AdaptivePolicy(linear_costs(1380, 130), linear_costs(300, 10, 30))
    machine.run(policy, [GOOD] * 4, 300)
    best, _ = best_fixed(machine, [GOOD] * 4)
    assert machine.run(policy, [GOOD] * 4, 600) >= 0.97 * best, (machine.by_k, policy.times.factors)


def test_sequences_have_their_own_k() -> None:
    machine = Machine(*CHEAP)
    rates: list[tuple[float, ...]] = [(0.95,) * 7] * 2 + [BAD] * 2
    best, _ = best_fixed(machine, rates)
    assert machine.run(AdaptivePolicy(*CHEAP), rates, 800) > best
    assert machine.by_k[7] > 0 and sum(machine.by_k[:3]) > 0


def test_a_kind_that_does_not_pay_is_hardly_drafted_for_and_not_forgotten() -> None:
    """Requests of 30 rounds. When the draft has become good, it is found out."""
    machine, policy = Machine(*TINY), AdaptivePolicy(*TINY)
    shares = []
    for rates in (BAD, BAD, GOOD):
        by_k = np.zeros(8)
        for _ in range(60):
            machine.run(policy, [rates], 30, temperature=1.0)
            by_k += machine.by_k
        shares.append(by_k[0] / by_k.sum())
    assert shares[0] > 0.8 and shares[1] > 0.9 and shares[2] < 0.5, shares


def test_the_draft_is_left_for_good_reasons_only() -> None:
    """If both are as fast, those that draft go on, and those that do not stay away."""
    machine, policy = Machine(*SLICE), AdaptivePolicy(*SLICE)
    own = [SpeculationController(7, 0.0) for _ in range(4)]
    for index, controller in enumerate(own):
        policy.admit(controller, own[:index], 4, 256)
    changes, before = 0, [c.uses_draft for c in own]
    for _ in range(400):
        policy.begin_round(own, 4, 256)
        counts = [c.num_chosen_tokens if c.uses_draft else 0 for c in own]
        machine._round(policy, own, [(0.62, 0.45, 0.3)] * 4, counts)
        now = [c.uses_draft for c in own]
        changes += now != before
        before = now
    assert changes <= 8


def prepared_badly() -> tuple[AdaptivePolicy, list[SpeculationController]]:
    """A sequence that drafts, for which none of it has just been prepared; all that came since was good."""
    policy, own = AdaptivePolicy(*CHEAP), [SpeculationController(7, 0.0)]
    policy.admit(own[0], [], 1, 64)
    for _ in range(ROUNDS_A_CHOICE - 1):
        policy.begin_round(own, 1, 64)
    for _ in range(2000):
        policy._pools[0].record(7, 0)
    policy.prepare_round(own, 1, 64)
    for _ in range(2000):
        policy._pools[0].record(7, 7)
    return policy, own


def test_a_choice_that_was_prepared_is_the_next_one_and_none_before() -> None:
    policy, own = prepared_badly()
    assert own[0].uses_draft and own[0].num_chosen_tokens > 1, "the step that is on its way was planned with it"
    policy.begin_round(own, 1, 64)
    assert not own[0].uses_draft and own[0].num_chosen_tokens == 0


def test_a_choice_that_was_prepared_holds_for_those_it_was_made_for() -> None:
    policy, own = prepared_badly()
    own.append(SpeculationController(7, 0.0))
    policy.admit(own[1], own[:1], 2, 128)
    policy.begin_round(own, 2, 128)
    assert min(c.num_chosen_tokens for c in own) > 1
    policy.begin_round(own, 2, 128)
    assert min(c.num_chosen_tokens for c in own) > 1


def test_a_round_in_which_the_device_waits_for_the_host_tells_nothing_of_the_device() -> None:
    """A launch takes 0.2 ms until the device begins; the draft would take 0.11, the host 0.6."""
    times = RoundTimes(*CHEAP)
    target, draft = StepShape(1, 2, 2, 64), StepShape(1, 2, 2, 64, 1)
    target_s = float(np.sum(times._target.fixed_and_variable(1, 2, 2, 64)))
    for _ in range(100):
        times.learn(
            Round(
                target=target,
                draft=draft,
                total_s=target_s + 0.0006,
                target_s=target_s + 0.0002,
                draft_s=0.0,
                draft_wait_s=0.0,
                is_overlapped=True,
            )
        )
    assert times.factors == [1.0] * 3
    one = np.array([1])
    assert times.drafting(1, one, one, one, one * 0.5, 64)[0] == pytest.approx(target_s + 0.0006)
    assert times.plain(1, 64) == pytest.approx(float(np.sum(times._target.fixed_and_variable(1, 1, 1, 64))))
