"""Rounds of an engine whose times and acceptance are given by formula, on a clock that only they move."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.policy import FixedPolicy, SpeculationPolicy
from kimi_backend.types.request import DraftSampling


@dataclass(frozen=True)
class Costs:
    """Seconds of a verify and of a draft call. b sequences, k draft tokens each."""

    verify: Callable[[int, int], float]
    draft: Callable[[int, int], float]

    def round_s(self, b: int, k: int) -> float:
        """A round in which all draft; k = 0: nobody does."""
        return self.verify(b, k) + (self.draft(b, k) if k else 0.0)


@dataclass(eq=False)
class SimulatedSequence:
    controller: SpeculationController
    rate: Callable[[int], float]
    """Conditional acceptance rate of every position, by tokens so far."""
    num_in_flight: int = 0
    num_tokens: int = 0
    age: int = 10**6
    """Rounds since its draft began in its middle."""
    uses_draft: bool = False
    credit: list[float] = field(default_factory=lambda: [0.5] * 7)


@dataclass
class Simulation:
    """Runs rounds under a policy and adds up what they took."""

    policy: SpeculationPolicy
    costs: Costs
    limit: int = 3
    seed: int = 0
    noise: Callable[[random.Random], float] = lambda rng: 1.0
    is_even: bool = True
    alone: float = 1.0
    """Time of a verify while nobody drafts over that of one whose draft only follows: less if it is launched ahead."""
    waited: float = 1.05
    """What the engine waits for its target where the draft only follows, over a round launched ahead without one."""
    settling: int = 0
    """Rounds that a draft guesses at half its rate after it began in the middle of a sequence."""
    now: float = 0.0
    rounds: list[int] = field(default_factory=list)
    """Most draft tokens proposed in each round."""
    running: list[SimulatedSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        if hasattr(self.policy, "_clock"):
            self.policy._clock = lambda: self.now

    @property
    def is_adaptive(self) -> bool:
        return not isinstance(self.policy, FixedPolicy)

    def add(self, rate: Callable[[int], float], num_expected: int | None = None) -> SimulatedSequence:
        controller = SpeculationController(self.limit, DraftSampling.COUPLED, 1.0)
        sequence = SimulatedSequence(controller, rate)
        running = [s.controller for s in self.running]
        self.policy.admit(controller, running, num_expected or len(self.running) + 1)
        sequence.uses_draft = controller.uses_draft
        self.running.append(sequence)
        return sequence

    def run(self, num_tokens: int) -> float:
        """Until every sequence has so many more tokens, on average; seconds that took."""
        start, before = self.now, sum(s.num_tokens for s in self.running)
        while sum(s.num_tokens for s in self.running) - before < num_tokens * len(self.running):
            self.round()
        return self.now - start

    def round(self, is_pure_decode: bool = True, extra_s: float = 0.0) -> None:
        b = len(self.running)
        self.policy.begin_round([s.controller for s in self.running], b)
        for s in self.running:
            if s.controller.uses_draft and not s.uses_draft:
                s.age = 0
            s.uses_draft = s.controller.uses_draft
        noise = self.noise(self.rng)
        verified = [s.num_in_flight for s in self.running]
        num_verifying = sum(k > 0 for k in verified)
        verify_s = self._mixed(self.costs.verify, b, max(verified), num_verifying)
        self.now += noise * verify_s * (1.0 if any(s.uses_draft for s in self.running) else self.alone) + extra_s
        if self.alone < 1:
            self.policy.think()
        for s in self.running:
            accepted = 0
            while accepted < s.num_in_flight and self._is_kept(s, accepted):
                accepted += 1
            s.num_tokens += 1 + accepted
            if s.num_in_flight:
                s.controller.record(s.num_in_flight, accepted)
                s.age += 1
            s.num_in_flight = s.controller.num_draft_tokens(10**6) if s.uses_draft else 0
        drafting = [s for s in self.running if s.uses_draft]
        k = max((s.num_in_flight for s in drafting), default=0)
        draft_s = noise * self._mixed(self.costs.draft, b, k, len(drafting)) if drafting else 0.0
        self.now += draft_s
        self.rounds.append(k)
        is_ahead = self.alone < 1
        target_s = noise * verify_s * (self.waited * self.alone if is_ahead else 1.0)
        self.policy.end_round(is_pure_decode=is_pure_decode, draft_s=0.0 if is_ahead else draft_s, target_s=target_s)

    def _is_kept(self, s: SimulatedSequence, position: int) -> bool:
        """At random, or evenly spread, which tells policies apart sooner."""
        if not self.is_even:
            return self.rng.random() < self._rate(s)
        s.credit[position] += self._rate(s)
        is_kept = s.credit[position] >= 1
        s.credit[position] -= is_kept
        return is_kept

    def _rate(self, s: SimulatedSequence) -> float:
        return s.rate(s.num_tokens) * (0.5 if s.age < self.settling else 1.0)

    @staticmethod
    def _mixed(cost: Callable[[int, int], float], b: int, k: int, num_members: int) -> float:
        """Half of what drafting adds is there whatever the number of members."""
        return cost(b, 0) + (cost(b, k) - cost(b, 0)) * (0.5 + 0.5 * num_members / b if num_members else 0)


def fixed_time(costs: Costs, k: int, rate: Callable[[int], float], num_sequences: int, num_tokens: int) -> float:
    """Expected seconds for so many tokens of each sequence with a fixed k."""
    seconds, tokens = 0.0, 0.0
    while tokens < num_tokens:
        a = rate(int(tokens))
        tokens += sum(a**j for j in range(k + 1))
        seconds += costs.round_s(num_sequences, k)
    return seconds
