"""`AdaptivePolicy`: how many tokens each sequence drafts, by what steps cost and how often drafts are right.

Costs are measured once (`types.step_costs`) and followed (`round_times`), acceptance is counted (`acceptance`); what is
chosen is `row_choice`. No round is run to find anything out.
"""

from dataclasses import replace

import numpy as np

from kimi_backend.spec_decode.acceptance import AcceptancePool, chances
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.round_times import Round, RoundTimes
from kimi_backend.spec_decode.row_choice import RowChoice, choose_more_rows, choose_rows
from kimi_backend.spec_decode.step_times import Floats, Ints
from kimi_backend.types.step_costs import StepCosts

ROUNDS_A_CHOICE = 4
"""A choice stands so long while the same sequences run."""
HOPE = 5.0
"""Verified tokens, all of them kept, that are added to what was seen where that looks too bad to draft at all."""
HOPED_DEPTH = 2
"""Draft tokens a round that might pay then. One is drafted to find out: a second one costs as much and is seldom
verified."""
LEAVING_GAIN = 1.01
"""Running sequences leave the draft where the round is faster by this much without it."""
RETURNING_SHARE = 0.8
"""The share of its chances that a sequence has when it comes back to the draft, whose KV lacks the text before."""
SETTLING_ROUNDS = 24
"""Such a sequence is not judged for so many rounds."""
IDLE_CHOICES = 8
"""A sequence of which so many choices in a row took no draft token leaves the draft."""
FADING_SHARE = 0.03
"""The share by which a kind's record fades with each of its requests that starts without the draft."""


class AdaptivePolicy:
    """Chooses for all sequences together. Used by the engine thread only."""

    def __init__(self, target: StepCosts, draft: StepCosts | None) -> None:
        self.times = RoundTimes(target, draft)
        self._pools = {kind: AcceptancePool() for kind in range(3)}
        self._chosen_for: tuple[int, ...] = ()
        self._num_rounds = 0
        self.num_chosen_tokens = 0

    def admit(
        self,
        controller: SpeculationController,
        running: list[SpeculationController],
        num_sequences: int,
        num_context_tokens: int,
    ) -> None:
        """See `SpeculationPolicy`. Those that are expected are taken for ones like it."""
        pool = controller.pool = self._pools[controller.kind]
        controller.uses_draft = True
        num_alike = max(num_sequences - len(running), 1)
        everyone = [*running, *[controller] * num_alike]
        choice = self._choice(everyone, max(num_sequences, len(everyone)), num_context_tokens)
        count = int(choice.num_draft_tokens[len(running)])
        controller.num_chosen_tokens, controller.num_idle_choices = count, 0
        controller.uses_draft = count > 0
        if not count:
            pool.fade(FADING_SHARE)

    def begin_round(
        self, controllers: list[SpeculationController], num_sequences: int, num_context_tokens: int
    ) -> None:
        """See `SpeculationPolicy`."""
        self._num_rounds += 1
        present = (num_sequences, *map(id, controllers))
        if present == self._chosen_for and self._num_rounds % ROUNDS_A_CHOICE:
            return
        self._chosen_for = present
        self.num_chosen_tokens = 0
        if not controllers:
            return
        least_gain = LEAVING_GAIN if any(c.uses_draft for c in controllers) else 1.0
        choice = self._choice(controllers, num_sequences, num_context_tokens, least_gain)
        counts: list[int] = choice.num_draft_tokens.tolist()
        for controller, count in zip(controllers, counts, strict=True):
            self._take(controller, count, leaves_now=not any(counts))
        self.num_chosen_tokens = max(counts)

    def choose_looked_up(self, likely: Floats, num_sequences: int, num_proposed: int, num_context_tokens: int) -> Ints:
        """See `SpeculationPolicy`."""
        return choose_more_rows(likely, num_sequences, num_proposed, num_context_tokens, self.times)

    def end_round(self, done: Round) -> None:
        """See `SpeculationPolicy`."""
        self.times.learn(done)

    def _take(self, controller: SpeculationController, count: int, *, leaves_now: bool) -> None:
        controller.num_chosen_tokens = count
        if count:
            if not controller.uses_draft:
                controller.num_unsettled_rounds = SETTLING_ROUNDS
            controller.uses_draft, controller.num_idle_choices = True, 0
        elif controller.uses_draft:
            controller.num_idle_choices += 1
            if leaves_now or controller.num_idle_choices >= IDLE_CHOICES:
                controller.uses_draft = False

    def _choice(
        self,
        controllers: list[SpeculationController],
        num_sequences: int,
        num_context_tokens: int,
        least_gain: float = 1.0,
    ) -> RowChoice:
        is_away = [not c.uses_draft for c in controllers]
        means = {kind: pool.mean_rate for kind, pool in self._pools.items()}
        limits = np.array([c.num_speculative_tokens for c in controllers])
        for hope in (0.0, HOPE):  # those that draft stop when they would lose even then
            factors = np.array([c.acceptance.factor(means[c.kind], hope) for c in controllers])
            rates = {kind: pool.rates(hope) for kind, pool in self._pools.items()}
            limits = np.minimum(limits, HOPED_DEPTH) if hope else limits
            likely = chances(np.array([rates[c.kind] for c in controllers]), factors, limits)
            likely[is_away] *= RETURNING_SHARE
            choice = choose_rows(likely, num_sequences, num_context_tokens, self.times, least_gain=least_gain)
            if choice.num_draft_tokens.any() or all(is_away):
                break
        return replace(choice, num_draft_tokens=np.minimum(choice.num_draft_tokens, 1)) if hope else choice
