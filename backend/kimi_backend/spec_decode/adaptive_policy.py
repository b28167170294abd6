"""As many draft tokens as emit most tokens a second, measured while serving (docs/decisions/0017)."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kimi_backend.spec_decode.acceptance import AcceptancePool, gains
from kimi_backend.spec_decode.choice import Choice, share_of
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.round_costs import FOLLOWING, RoundCosts, row_of
from kimi_backend.spec_decode.standing import FEWEST_ROUNDS, Standing
from kimi_backend.spec_decode.visits import Visit, Visits
from kimi_backend.spec_decode.weighing import Weighing

SETTLING_ROUNDS = 30
"""Rounds until a draft whose KV began in the middle of a sequence guesses about as well as it ever will: until then it
is not judged."""
TRIAL_MEMORY, NEWCOMER_MEMORY, KEPT_CHANGES = 16, 6, 4
"""Rounds that still count when a trial begins, so that what is new is believed; when a newcomer begins it, whose draft
will have seen all its text; and changes of cost of each kind."""
DECISION_ROUNDS, SETTLED_ROUNDS = 4, 16
"""Rounds from one weighing to the next: while something is open, and when all is known. A weighing of 16 sequences
takes 0.1 ms of the engine's thread, a round of a small model on a GPU 1 ms."""
SWITCH_REGRET = 0.3
"""Rounds' worth of tokens that another number of draft tokens would have gained before it is taken."""
FOLLOWING_PART, FOLLOWING_AHEAD_PART = 0.5, 0.85
"""Of what is not known of drafting's cost: where what following costs is more, only leaving the draft tells more."""
HIDDEN_SHARE = 0.01
"""Of a round that drafts; who waits for less of it for the draft has launched it ahead."""
ROW_ROUNDS = 8
"""Rounds that the number of sequences must stay changed for before another size's standing counts."""


@dataclass(frozen=True, slots=True)
class _Setup:
    """What a round's cost depends on."""

    num_sequences: int
    num_members: int
    num_draft_tokens: int


class AdaptivePolicy:
    """One number of draft tokens for all that draft, and who drafts. Used by the engine thread only."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.costs = RoundCosts()
        self._clock = clock
        self._pools: dict[int, AcceptancePool] = {}
        self._standings: dict[tuple[int, int], Standing] = {}
        """By row of `RoundCosts` and kind of request."""
        self._visits: dict[int, Visits] = {}
        self._controllers: list[SpeculationController] = []
        self._num_sequences = 0
        self._row: int | None = None
        """Whose standings count."""
        self._row_rounds = 0
        self._num_draft_tokens = 0
        """Of the choice that stands, for those that draft; 0 until there was a sequence to choose for."""
        self._regret = 0.0
        self._visit: Visit | None = None
        self._visit_of_round: Visit | None = None
        """The visit that this round belongs to; one may begin with the next."""
        self._setup: _Setup | None = None
        self._last_setup: _Setup | None = None
        self._begin_s = 0.0
        self._num_until_decision = 0
        self._num_since_decision = 0
        self._num_drafted = 0
        self._hidden = 0.0
        """Share of late rounds in which the draft was hardly waited for."""

    @property
    def num_chosen_tokens(self) -> int:
        return self._setup.num_draft_tokens if self._setup is not None and self._setup.num_members else 0

    def admit(
        self, controller: SpeculationController, running: list[SpeculationController], num_sequences: int
    ) -> None:
        """See `SpeculationPolicy.admit`."""
        controller.pool = self._pools.setdefault(controller.kind, AcceptancePool())
        controller.num_unsettled_rounds = 0
        row = row_of(num_sequences)
        if not running:
            self._row, self._row_rounds = row, 0
        standing = self._standing(row if self._row is None else self._row, controller.kind)
        if standing.is_ready:
            self._begin_trial(standing, controller.kind, NEWCOMER_MEMORY)
        controller.uses_draft = standing.is_on
        if not self._num_draft_tokens:
            self._num_draft_tokens = controller.num_speculative_tokens
        self._set_tokens([controller])

    def begin_round(self, controllers: list[SpeculationController], num_sequences: int) -> None:
        """See `SpeculationPolicy.begin_round`."""
        self._begin_s = self._clock()
        self._controllers, self._num_sequences = controllers, num_sequences
        if num_sequences:
            self._follow_row(row_of(num_sequences))
        if self._visit is not None and self._is_over(self._visit):
            self._end_visit(self._visit)
        if self._visit is None and controllers:
            self._num_until_decision -= 1
            self._num_since_decision += 1
            if self._num_until_decision <= 0:
                self._decide_again()
        self._visit_of_round = self._visit
        self._set_tokens(controllers)
        num_members = len(self._members)
        self._setup = _Setup(num_sequences, num_members, self._tokens_now if num_members else 0)

    def think(self) -> None:
        """See `SpeculationPolicy.think`."""
        if self._visit is None and self._controllers and self._num_until_decision == 1:
            self._decide_again()
            self._num_until_decision += 1

    def _decide_again(self) -> None:
        self._num_until_decision = DECISION_ROUNDS if self._decide() else SETTLED_ROUNDS
        self._num_since_decision = 0

    def end_round(self, *, is_pure_decode: bool, draft_s: float, target_s: float) -> None:
        """See `SpeculationPolicy.end_round`."""
        seconds, setup = self._clock() - self._begin_s, self._setup
        # A round is as its setup says when the one before it has drafted what it verifies.
        is_clean = is_pure_decode and setup is not None and setup == self._last_setup
        self._last_setup = setup if is_pure_decode else None
        if setup is None or not setup.num_sequences or self._row is None:
            return
        for kind in {c.kind for c in self._controllers}:
            self._standing(self._row, kind).num_rounds += 1
        if setup.num_members:
            self._book.pass_round()
        if is_clean:
            self._record_cost(setup, seconds, draft_s, target_s)
        else:
            self.costs.pass_round()
        if self._visit_of_round is not None:
            self._visit_of_round.patience -= 1
            self._visit_of_round.num_left -= is_clean

    def _record_cost(self, setup: _Setup, seconds: float, draft_s: float, target_s: float) -> None:
        if not setup.num_members:
            self.costs.record(setup.num_sequences, 0, seconds)
        elif not setup.num_draft_tokens:
            # The draft only follows; what the engine waits for it would not be there without one.
            alone_s = seconds - draft_s
            if self.costs.launches_ahead:
                # Without one, host and device would work at the same time: the longer of both counts.
                alone_s = max(target_s, alone_s - target_s)
            self.costs.record(setup.num_sequences, FOLLOWING, alone_s)
        else:
            hidden = draft_s < HIDDEN_SHARE * seconds
            self._num_drafted += 1
            self._hidden += max(0.1, 1 / self._num_drafted) * (hidden - self._hidden)
            self.costs.launches_ahead = self._hidden > 0.5
            share = 1.0
            if setup.num_members < setup.num_sequences:
                share = share_of(setup.num_members, setup.num_sequences)
            self.costs.record(setup.num_sequences, setup.num_draft_tokens, seconds, share)

    def _is_over(self, visit: Visit) -> bool:
        return visit.is_over or not (visit.leaves_draft or self._members)

    def _end_visit(self, visit: Visit) -> None:
        self._visit = None
        if visit.leaves_draft:
            self._num_until_decision = 0  # who comes back is decided at once

    @property
    def _tokens_now(self) -> int:
        return self._num_draft_tokens if self._visit is None else self._visit.num_draft_tokens

    @property
    def _members(self) -> list[SpeculationController]:
        return [c for c in self._controllers if c.uses_draft]

    @property
    def _book(self) -> Visits:
        assert self._row is not None
        return self._visits.setdefault(self._row, Visits())

    def _set_tokens(self, controllers: list[SpeculationController]) -> None:
        if not self._num_draft_tokens:
            return
        for controller in controllers:
            wanted = min(self._tokens_now, controller.num_speculative_tokens)
            controller.num_chosen_tokens = wanted if controller.uses_draft else 0

    def _follow_row(self, row: int) -> None:
        """A load that comes and goes within a few rounds changes nobody's draft."""
        self._row_rounds = self._row_rounds + 1 if row != self._row else 0
        if self._row is None or self._row_rounds >= ROW_ROUNDS:
            self._row, self._row_rounds, self._num_until_decision = row, 0, 0

    def _standing(self, row: int, kind: int) -> Standing:
        """A size seen for the first time begins on trial."""
        if (row, kind) not in self._standings:
            self._standings[row, kind] = Standing()
        return self._standings[row, kind]

    def _begin_trial(self, standing: Standing, kind: int, num_remembered: float) -> None:
        standing.begin_trial()
        self._num_until_decision = 0
        self._pools[kind].forget(num_remembered)
        if self._row is not None:
            self.costs.forget(2**self._row, KEPT_CHANGES)

    def _decide(self) -> bool:
        """Who drafts and how many tokens; then whether to visit another number. False if nothing is open."""
        assert self._row is not None
        standings = {c.kind: self._standing(self._row, c.kind) for c in self._controllers}
        for kind, standing in standings.items():
            if standing.is_overdue:
                self._begin_trial(standing, kind, TRIAL_MEMORY)
        on = {kind for kind, standing in standings.items() if standing.is_on}
        if on:
            weighing = Weighing(self.costs.ratios(2**self._row), self._gains(), self._num_sequences)
            choice = self._best(on, weighing)
            for kind in sorted(on):
                pool = self._pools[kind]
                if pool.num_remembered < FEWEST_ROUNDS or not standings[kind].may_be_judged:
                    continue
                mine = [c.kind == kind for c in self._controllers]
                if not standings[kind].judge(weighing.log_gains(choice, mine, pool), choice.num_draft_tokens):
                    on.discard(kind)
                    choice = self._best(on, weighing)
            self._take(choice)
        else:
            self._take(Choice(0, (False,) * len(self._controllers), 0.0))
        if not self._members:
            return False
        is_open = not all(standings[kind].is_sure for kind in on)
        return self._explore(weighing, is_open) or is_open or self._regret > 0

    def _gains(self) -> list[list[float]]:
        rates = {kind: (pool.rates(), pool.mean_rate) for kind, pool in self._pools.items()}
        result = []
        for controller in self._controllers:
            kind_rates, mean = rates[controller.kind]
            result.append(gains(kind_rates, controller.acceptance.factor(mean), controller.num_speculative_tokens))
        return result

    def _best(self, on: set[int], weighing: Weighing) -> Choice:
        """The fastest choice in which each kind of `on` drafts: all its sequences while one is on trial, those that pay
        beside the others once all are sure. The number of tokens changes only after a while of regret."""
        assert self._row is not None
        is_sure = all(self._standing(self._row, kind).is_sure for kind in on)
        choice = weighing.best([c.kind in on for c in self._controllers], everyone=not is_sure)
        if not choice.num_draft_tokens:
            return choice
        now = weighing.rate(choice.members, self._num_draft_tokens)
        self._regret += (choice.tokens_per_s / now - 1) * self._num_since_decision
        if choice.num_draft_tokens == self._num_draft_tokens or self._regret >= SWITCH_REGRET:
            self._regret = 0.0
            return choice
        return Choice(self._num_draft_tokens, choice.members, now)

    def _take(self, choice: Choice) -> None:
        if choice.num_draft_tokens:
            self._num_draft_tokens = choice.num_draft_tokens
        for controller, wants in zip(self._controllers, choice.members, strict=True):
            if wants and not controller.uses_draft:
                controller.num_unsettled_rounds = SETTLING_ROUNDS
                controller.acceptance.forget()
            controller.uses_draft = wants

    def _explore(self, weighing: Weighing, is_open: bool) -> bool:
        """Begin a visit where it is time for one. Whether another number of draft tokens may be better."""
        standing_doubt = weighing.costs.doubt[self._num_draft_tokens]
        is_ahead = self.costs.launches_ahead
        part = FOLLOWING_AHEAD_PART if is_ahead else FOLLOWING_PART
        # Drafts that only follow tell no more of what is in doubt then.
        only_leaving_tells = is_open and weighing.costs.doubt_of_following > part * standing_doubt
        if only_leaving_tells and self._book.wants_real_check(is_ahead):
            self._visit = self._book.begin_real_check()
            for controller in self._members:
                controller.uses_draft = False
            return True
        members = tuple(c.uses_draft for c in self._controllers)
        found = weighing.most_hopeful(members, self._num_draft_tokens)
        if found is not None and self._book.is_visits_turn:
            self._visit = self._book.begin_visit(*found)
        may_check = not (only_leaving_tells and is_ahead)
        if self._visit is None and may_check and self._book.wants_check(is_open):
            self._visit = self._book.begin_check(is_open)
        if self._visit is None and found is not None:
            self._visit = self._book.begin_visit(*found)
        return found is not None or self._visit is not None
