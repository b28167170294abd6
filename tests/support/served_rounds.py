"""Requests of one kind served one after another in simulated rounds, on a quiet or busy machine, or as recorded."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.policy import SpeculationPolicy
from kimi_backend.types.request import DraftSampling
from support.simulated_rounds import Costs, SimulatedSequence, Simulation

RECORDED = Path(__file__).with_name("busy_rounds.txt")
"""Rounds of kimi-nano without a draft on two cores that five other programs kept busy (load 5), one after another, in
per cent of a quiet one. Half take longer than 194, a tenth longer than 350."""
TOKENS_OF_REQUEST = 128
NUM_LEARNING = 300
"""Rounds after which a policy is expected to know."""


@dataclass(frozen=True)
class Case:
    """Times of a round and of the draft's part in it for 0, 1, 2, 3 draft tokens, and conditional acceptance rates."""

    round_ms: tuple[float, float, float, float]
    draft_ms: tuple[float, float, float]
    rates: tuple[float, float, float]
    temperature: float
    growth: float = 0.6
    """A round of b sequences takes b ** growth as long."""
    following: float = 0.8
    """A draft that only follows takes so much of the time for one draft token."""
    alone: float = 1.0
    """See `Simulation`; a GPU launches rounds ahead while nobody drafts."""

    @property
    def costs(self) -> Costs:
        draft = (0.0, *self.draft_ms)
        verify = [total - part for total, part in zip(self.round_ms, draft, strict=True)]
        return Costs(
            lambda b, k: b**self.growth * verify[k],
            lambda b, k: b**self.growth * (draft[k] if k else self.following * draft[1]),
        )

    def tokens_per_ms(self, k: int, num_sequences: int) -> float:
        """With a fixed k."""
        reached = tokens = 1.0
        for rate in self.rates[:k]:
            reached *= rate
            tokens += reached
        return num_sequences * tokens / self.costs.round_s(num_sequences, k) / (1.0 if k else self.alone)


CASES = {
    "gains half": Case((4.42, 6.66, 8.13, 8.53), (2.2, 2.9, 3.2), (0.81, 0.80, 0.69), 0.0),
    "gains a quarter": Case((2.01, 3.6, 4.2, 4.64), (0.9, 1.3, 1.6), (0.81, 0.80, 0.69), 0.0, growth=0.3),
    "gains a twelfth": Case((4.0, 5.74, 6.6, 7.2), (1.2, 1.7, 2.1), (0.55, 0.42, 0.70), 1.0),
    "loses a twelfth": Case((4.0, 6.67, 7.66, 8.35), (1.2, 1.7, 2.1), (0.55, 0.42, 0.70), 1.0),
    "loses a tenth ahead": Case(
        (4.0, 6.2, 7.0, 7.6), (1.2, 1.7, 2.1), (0.55, 0.42, 0.70), 1.0, growth=0.3, following=0.3, alone=0.9
    ),
    "gains a quarter ahead": Case(
        (2.1, 3.6, 4.1, 4.4), (0.9, 1.3, 1.6), (0.81, 0.80, 0.69), 0.0, growth=0.3, following=0.3, alone=0.9
    ),
    "loses a third ahead": Case(
        (2.0, 2.9, 3.7, 4.5), (0.8, 1.6, 2.4), (0.17, 0.17, 0.17), 1.0, growth=0.3, following=0.3, alone=0.8
    ),
    "loses a sixth": Case((4.17, 7.54, 8.84, 9.71), (2.4, 3.1, 3.6), (0.55, 0.42, 0.70), 1.0),
}
"""The first and the last were measured: kimi-nano on a CPU, greedily and at temperature 1."""


def quiet(rng: random.Random) -> Iterator[float]:
    while True:
        yield rng.lognormvariate(0, 0.04)


def busy(rng: random.Random) -> Iterator[float]:
    """Twice as long for some forty rounds, then not, each round a quarter off."""
    is_slow = False
    while True:
        for _ in range(1 + int(rng.expovariate(1 / 40))):
            yield rng.lognormvariate(0, 0.25) * (2 if is_slow else 1)
        is_slow = not is_slow


def recorded(rng: random.Random) -> Iterator[float]:
    """From a random place on, and around."""
    rounds = [int(word) / 100 for word in RECORDED.read_text(encoding="utf-8").split()]
    place = rng.randrange(len(rounds))
    while True:
        yield rounds[place % len(rounds)]
        place += 1


NOISES: dict[str, Callable[[random.Random], Iterator[float]]] = {"quiet": quiet, "busy": busy, "recorded": recorded}


class ServedRounds(Simulation):
    """So many sequences at a time; who has all its tokens is followed by another at once."""

    def __init__(self, policy: SpeculationPolicy, case: Case, noise: str, seed: int, num_sequences: int) -> None:
        factors = NOISES[noise](random.Random(1000 + seed))
        super().__init__(policy, case.costs, seed=seed, noise=lambda _: next(factors), is_even=False, settling=12)
        self.alone = case.alone
        self._case = case
        self._num_sequences = num_sequences

    def serve(self, num_rounds: int) -> float:
        """Tokens a millisecond of the rounds after the first NUM_LEARNING, at the times that a quiet machine takes."""
        tokens = quiet_ms = 0.0
        for index in range(num_rounds):
            is_pure_decode = not self._replace_ended()
            before = sum(s.num_tokens for s in self.running)
            verified = [s.num_in_flight for s in self.running]
            self.round(is_pure_decode=is_pure_decode)
            if index >= NUM_LEARNING:
                tokens += sum(s.num_tokens for s in self.running) - before
                quiet_ms += self._quiet_ms(verified)
        return tokens / quiet_ms if quiet_ms else 0.0

    def _quiet_ms(self, verified: list[int]) -> float:
        b, drafting = len(self.running), sum(s.uses_draft for s in self.running)
        verify = self._mixed(self.costs.verify, b, max(verified), sum(k > 0 for k in verified))
        if not drafting:
            return verify * self.alone
        return verify + self._mixed(self.costs.draft, b, self.rounds[-1], drafting)

    def _replace_ended(self) -> bool:
        """Whether somebody starts."""
        self.running = [s for s in self.running if s.num_tokens < TOKENS_OF_REQUEST]
        num_new = self._num_sequences - len(self.running)
        for _ in range(num_new):
            controller = SpeculationController(self.limit, DraftSampling.COUPLED, self._case.temperature)
            self.policy.admit(controller, [s.controller for s in self.running], self._num_sequences)
            sequence = SimulatedSequence(controller, lambda _: 0.5)
            sequence.uses_draft = controller.uses_draft
            self.running.append(sequence)
        return num_new > 0

    def _is_kept(self, s: SimulatedSequence, position: int) -> bool:
        unsettled = 0.6 if s.age < self.settling else 1.0
        return self.rng.random() < self._case.rates[position] * unsettled
