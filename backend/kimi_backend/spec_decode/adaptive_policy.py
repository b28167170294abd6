"""`AdaptivePolicy`: how many tokens each sequence drafts, by what steps cost and how often drafts are right.

Costs are measured once (`types.step_costs`) and followed (`round_times`), acceptance is counted (`acceptance`); what is
chosen is `row_choice`. No round is run to find anything out.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from kimi_backend.spec_decode.acceptance import AcceptancePool, chances
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.looked_up import KIND_MEMORY, Expected, LookedUp
from kimi_backend.spec_decode.lookup import NUM_REPETITIONS
from kimi_backend.spec_decode.round_times import Round, RoundTimes
from kimi_backend.spec_decode.row_choice import Batch, RowChoice, choose_more_rows, choose_rows
from kimi_backend.spec_decode.step_times import Floats, Ints
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS
from kimi_backend.types.step_costs import StepCosts

ROUNDS_A_CHOICE = 4
"""A choice stands so long while the same sequences run."""
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
        self.step_costs = {"target": target, **({} if draft is None else {"draft": draft})}
        self.times = RoundTimes(target, draft)
        self._pools = {kind: AcceptancePool() for kind in range(3)}
        repetitions = range(NUM_REPETITIONS)
        self._looked_up = {(kind, part): LookedUp(KIND_MEMORY) for kind in range(3) for part in repetitions}
        self._chosen_for: tuple[int, ...] = ()
        self._prepared: tuple[tuple[int, ...], RowChoice] | None = None
        """The choice that `prepare_round` made, and for whom."""
        self._num_rounds = 0
        self._finds_out = False
        """The last choice is to find out whether the draft pays after all: the next round chooses again."""
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
        controller.looked_up.kind = self._looked_up[controller.kind, controller.repetition]
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
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == present:
            choice = prepared[1]
        elif present == self._chosen_for and self._num_rounds % ROUNDS_A_CHOICE and not self._finds_out:
            return
        else:
            choice = None
        self._chosen_for = present
        self.num_chosen_tokens = 0
        if not controllers:
            return
        if choice is None:
            choice = self._choice_to_go_on(controllers, num_sequences, num_context_tokens)
        counts: list[int] = choice.num_draft_tokens.tolist()
        for controller, count in zip(controllers, counts, strict=True):
            self._take(controller, count, leaves_now=not any(counts))
        self.num_chosen_tokens = max(counts)

    def prepare_round(
        self, controllers: list[SpeculationController], num_sequences: int, num_context_tokens: int
    ) -> None:
        """See `SpeculationPolicy`."""
        if not controllers or ((self._num_rounds + 1) % ROUNDS_A_CHOICE and not self._finds_out):
            return
        present = (num_sequences, *map(id, controllers))
        self._prepared = present, self._choice_to_go_on(controllers, num_sequences, num_context_tokens)

    def choose_looked_up(self, likely: Floats, batch: Batch) -> Ints:
        """See `SpeculationPolicy`."""
        overlaps_next = batch.overlaps_next or (self.times.is_overlapped and not batch.is_drafting)
        return choose_more_rows(likely, replace(batch, overlaps_next=overlaps_next), self.times)

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

    def _choice_to_go_on(
        self, controllers: list[SpeculationController], num_sequences: int, num_context_tokens: int
    ) -> RowChoice:
        least_gain = LEAVING_GAIN if any(c.uses_draft for c in controllers) else 1.0
        return self._choice(controllers, num_sequences, num_context_tokens, least_gain)

    def _choice(
        self,
        controllers: list[SpeculationController],
        num_sequences: int,
        num_context_tokens: int,
        least_gain: float = 1.0,
    ) -> RowChoice:
        choose = partial(
            choose_rows,
            num_seqs=num_sequences,
            num_context_tokens=num_context_tokens,
            times=self.times,
            looked_up=Expected.of([c.looked_up for c in controllers]),
        )
        likely = self._likely(controllers, highest=False)
        choice, self._finds_out = choose(likely, least_gain=least_gain), False
        if choice.num_draft_tokens.any() or not any(c.uses_draft for c in controllers):
            return choice
        # Those that draft stop when they would lose even if all that was seen was bad luck.
        hoped = choose(self._likely(controllers, highest=True), least_gain=least_gain).num_draft_tokens
        if not hoped.any():
            return choice
        self._finds_out = True
        likely[hoped == 0] = 0.0
        return choose(likely, finds_out=True)

    def _likely(self, controllers: list[SpeculationController], *, highest: bool) -> Floats:
        """[C, MAX_SPECULATIVE_TOKENS] chances of each, or the highest that they may be."""
        kinds = [c.kind for c in controllers]
        rates, means = np.empty((len(self._pools), MAX_SPECULATIVE_TOKENS)), {}
        for kind in set(kinds):
            pool = self._pools[kind]
            rates[kind] = pool.highest_rates() if highest else pool.rates()
            means[kind] = pool.mean_rate
        factors = [c.acceptance.factor(means[c.kind], highest=highest) for c in controllers]
        found = chances(rates[kinds], factors, [c.num_speculative_tokens for c in controllers])
        is_away = [not c.uses_draft for c in controllers]
        if any(is_away):
            found[is_away] *= RETURNING_SHARE
        return found
