"""As many draft tokens as emit most tokens a second, measured while serving (docs/decisions/0017)."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from kimi_backend.spec_decode.acceptance import AcceptancePool, gains
from kimi_backend.spec_decode.choice import Choice, best_choice, rate, round_s, share_of
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.exploration import (
    FEWEST_TRIAL_ROUNDS,
    GRACE_ROUNDS,
    SETTLING_ROUNDS,
    TRIAL_ROUNDS,
    VISIT_ROUNDS,
    Ledger,
    Visit,
    trial_of,
)
from kimi_backend.spec_decode.round_costs import RoundCosts

SWITCH_REGRET = 0.3
"""Rounds' worth of tokens that another choice would have gained before it is taken: small differences wait long."""
BEGIN_REGRET = 2.0
"""Likewise, more for each sequence that must begin to draft: its draft has seen nothing of it and guesses worse at
first, and it may have to stop again."""
DOUBT_TO_BEGIN = 0.5
"""Part of both costs' doubt that drafting must overcome before it is begun."""
PLAIN_DISCOUNT = 0.95
"""On the cost of not drafting, wherever the two are compared: less of a gain than this is not worth the risk."""
FIRST_CHECK_ROUNDS = 50
"""After so many rounds it is checked, whatever the ledger says, what drafting nothing would cost; then after four times
as many, and so on up to the next number."""
STALE_ROUNDS = 1000
"""After so many a neighbouring number of draft tokens may be timed again."""
DOUBTS = 3.0
"""A number of draft tokens is timed again while so many times the doubt of its cost could make it the better one."""
LEAST_LOSS = 0.05
"""Part of a visit's time that the ledger is asked for at least; what it did lose is entered afterwards."""
DECISION_ROUNDS, IDLE_DECISION_ROUNDS = 4, 16
"""Rounds from one weighing of the choice to the next, while somebody drafts and while nobody does; one while the costs
for so many sequences are not known."""


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
        self.ledger = Ledger()
        self._clock = clock
        self._pools: dict[int, AcceptancePool] = {}
        self._controllers: list[SpeculationController] = []
        self._num_sequences = 0
        self._num_draft_tokens: int | None = None
        """Of the standing choice; None until there was a sequence to choose for."""
        self._regret = 0.0
        self._visit: Visit | None = None
        self._setup: _Setup | None = None
        self._last_setup: _Setup | None = None
        self._begin_s = 0.0
        self._num_accepted = 0
        self._num_until_decision = self._decided_for = 0

    @property
    def num_chosen_tokens(self) -> int:
        return self._setup.num_draft_tokens if self._setup is not None and self._setup.num_members else 0

    def admit(
        self, controller: SpeculationController, running: list[SpeculationController], num_sequences: int
    ) -> None:
        """See `SpeculationPolicy.admit`."""
        controller.pool = self._pools.setdefault(controller.kind, AcceptancePool())
        controller.num_unsettled_rounds = 0
        controller.uses_draft = True
        times = self.costs.estimates(num_sequences)
        if times is not None:
            times[0] *= PLAIN_DISCOUNT
            best = self._best([*running, controller], times, num_sequences)
            controller.uses_draft = best.members[-1]
            if not any(c.uses_draft for c in running):
                self._num_draft_tokens = best.num_draft_tokens
                self._regret = 0.0
                if not controller.uses_draft:
                    self._try(controller, times, num_sequences)
        self._set_tokens([controller])

    def begin_round(self, controllers: list[SpeculationController], num_sequences: int) -> None:
        """See `SpeculationPolicy.begin_round`."""
        self._begin_s = self._clock()
        self._controllers, self._num_sequences = controllers, num_sequences
        if self._num_draft_tokens is None:
            self._num_draft_tokens = max((c.num_speculative_tokens for c in controllers), default=None)
        if self._visit is not None and self._is_over(self._visit):
            self._end_visit(self._visit)
        if self._visit is None and controllers:
            self._num_until_decision -= 1
            if self._num_until_decision <= 0 or num_sequences != self._decided_for:
                self._num_until_decision = self._rounds_to_next_decision()
                self._decided_for = num_sequences
                self._decide()
        self._set_tokens(controllers)
        num_members = sum(c.uses_draft for c in controllers)
        self._setup = None
        if num_sequences:
            self._setup = _Setup(num_sequences, num_members, self._tokens_now if num_members else 0)
        self._num_accepted = self._count_accepted()

    def end_round(self, *, is_pure_decode: bool, draft_s: float) -> None:
        """See `SpeculationPolicy.end_round`."""
        seconds, setup = self._clock() - self._begin_s, self._setup
        # A round is as its setup says when the one before it has drafted what it verifies.
        is_clean = is_pure_decode and setup is not None and setup == self._last_setup
        self._last_setup = setup if is_pure_decode else None
        self.ledger.total_s += seconds
        if setup is None:
            return
        if is_clean:
            self._record_cost(setup, seconds, draft_s)
        if self._visit is not None:
            visit = self._visit
            visit.seconds += self._usual(setup, seconds)
            visit.num_tokens += setup.num_sequences + self._count_accepted() - self._num_accepted
            visit.patience -= 1
            visit.num_left -= is_clean if visit.member is None else not visit.member.num_unsettled_rounds

    def _usual(self, setup: _Setup, seconds: float) -> float:
        """Without what held a single round up for another reason."""
        times = self.costs.estimates(setup.num_sequences)
        if times is None:
            return seconds
        return min(seconds, 4 * round_s(times, setup.num_draft_tokens, setup.num_members, setup.num_sequences))

    def _record_cost(self, setup: _Setup, seconds: float, draft_s: float) -> None:
        k = setup.num_draft_tokens
        if setup.num_members and not k:
            self.costs.record(setup.num_sequences, 0, seconds - draft_s, is_proxy=True)
        else:
            self.costs.record(setup.num_sequences, k, self._as_if_all(setup, seconds))

    def _as_if_all(self, setup: _Setup, seconds: float) -> float:
        """Seconds of the round if all its sequences had drafted."""
        b, times = setup.num_sequences, self.costs.estimates(setup.num_sequences)
        if not setup.num_members or setup.num_members == b or times is None or not self.costs.is_known(b, 0):
            return seconds
        share = share_of(setup.num_members, b)
        return max(seconds, times[0] + (seconds - times[0]) / share)

    @property
    def _tokens_now(self) -> int:
        if self._visit is not None:
            return self._visit.num_draft_tokens
        return self._num_draft_tokens or 0

    @property
    def _members(self) -> list[SpeculationController]:
        return [c for c in self._controllers if c.uses_draft]

    def _set_tokens(self, controllers: list[SpeculationController]) -> None:
        k = self._tokens_now
        if self._num_draft_tokens is None:
            return
        for controller in controllers:
            controller.num_chosen_tokens = min(k, controller.num_speculative_tokens) if controller.uses_draft else 0

    def _count_accepted(self) -> int:
        return sum(pool.num_accepted for pool in self._pools.values())

    def _gains(self, controllers: list[SpeculationController]) -> list[list[float]]:
        rates = {kind: (pool.rates(), pool.mean_rate) for kind, pool in self._pools.items()}
        result = []
        for controller in controllers:
            kind_rates, mean = rates[controller.kind]
            result.append(gains(kind_rates, controller.acceptance.factor(mean), controller.num_speculative_tokens))
        return result

    def _best(self, controllers: list[SpeculationController], times: list[float], num_sequences: int) -> Choice:
        """The fastest choice; of those that draft, while little is known of a kind that drafts."""
        chances = self._gains(controllers)
        best = best_choice(times, chances, num_sequences)
        young = tuple(c.uses_draft and c.pool is not None and c.pool.num_rounds < GRACE_ROUNDS for c in controllers)
        if best.num_draft_tokens or not any(young):
            return best
        rates = [rate(times, chances, young, k, num_sequences) for k in range(1, max(map(len, chances)))]
        return Choice(1 + rates.index(max(rates)), young, max(rates))

    def _decide(self) -> None:
        b, members = self._num_sequences, self._members
        k = (self._num_draft_tokens or 0) if members else 0
        times = self._times_to_compare(k, members)
        if times is None:
            return
        chances = self._gains(self._controllers)
        now = rate(times, chances, tuple(c.uses_draft for c in self._controllers), k, b)
        if members and not self.costs.is_known(b, 0) and b / times[0] * (1 + DOUBTS * self.costs.doubt(b, 0)) > now:
            self._visit = Visit(0, now)  # what drafting is to be compared with, at any price
            return
        best = self._best(self._controllers, times, b)
        if not members and best.tokens_per_s < now * (1 + self._doubt(best.num_draft_tokens)):
            best = Choice(0, (False,) * len(chances), now)
        if best.tokens_per_s <= now:
            self._regret = 0.0
        else:
            self._regret += (best.tokens_per_s / now - 1) * self._num_until_decision
            if self._regret >= self._regret_to_switch(best):
                self._take(best)
                return
        self._explore(times, now, k)

    def _times_to_compare(self, k: int, members: list[SpeculationController]) -> list[float] | None:
        """[k] seconds of a round; None while the rounds that run now have not been measured."""
        b = self._num_sequences
        times = self.costs.estimates(b)
        is_measurable = not members or len(members) == b
        if times is None or (is_measurable and not self.costs.is_known(b, k)):
            return None
        times[0] *= PLAIN_DISCOUNT
        return times

    def _rounds_to_next_decision(self) -> int:
        if not self.costs.is_known(self._num_sequences, 0):
            return 1
        return DECISION_ROUNDS if self._members else IDLE_DECISION_ROUNDS

    def _doubt(self, k: int) -> float:
        """By how much drafting must be better than not drafting to be begun: in doubt, it is not."""
        return DOUBT_TO_BEGIN * (self.costs.doubt(self._num_sequences, k) + self.costs.doubt(self._num_sequences, 0))

    def _regret_to_switch(self, best: Choice) -> float:
        num_begins = sum(wants and not c.uses_draft for c, wants in zip(self._controllers, best.members, strict=True))
        return SWITCH_REGRET + BEGIN_REGRET * num_begins / self._num_sequences

    def _take(self, best: Choice) -> None:
        self._regret = 0.0
        self._num_draft_tokens = best.num_draft_tokens
        for controller, wants in zip(self._controllers, best.members, strict=True):
            if wants and not controller.uses_draft:
                controller.num_unsettled_rounds = SETTLING_ROUNDS
            controller.uses_draft = wants

    def _explore(self, times: list[float], now: float, k: int) -> None:
        """Begin a visit that may pay, if the ledger allows what it may lose."""
        if not self._members:
            self._try(self._controllers[-1], times, self._num_sequences, num_unsettled_rounds=SETTLING_ROUNDS)
            return
        limit = max(c.num_speculative_tokens for c in self._controllers)
        for other in (0, k + 1, k - 1):
            if 0 <= other <= limit and self._is_worth_a_visit(other, times, now):
                self._visit = Visit(other, now)
                return

    def _is_worth_a_visit(self, k: int, times: list[float], now: float) -> bool:
        """Whether its cost is so uncertain that it may be the better choice after all, or was seen too long ago."""
        b = self._num_sequences
        age = self.costs.age(b, k)
        if k == 0 and age > min(FIRST_CHECK_ROUNDS * 4 ** (self.costs.num_stays(b, 0) - 1), STALE_ROUNDS):
            return True
        members = tuple(c.uses_draft and k > 0 for c in self._controllers)
        there = rate(times, self._gains(self._controllers), members, k, b)
        likely_loss = max(LEAST_LOSS, 1 - there / now) * (VISIT_ROUNDS + 1) * times[k]
        if not self.ledger.allows(likely_loss):
            return False
        is_uncertain = there <= now < there * (1 + DOUBTS * self.costs.doubt(b, k))
        return is_uncertain or age > STALE_ROUNDS

    def _try(
        self, member: SpeculationController, times: list[float], num_sequences: int, num_unsettled_rounds: int = 0
    ) -> None:
        """Let one sequence draft for a while though the others do not, if the ledger allows it."""
        if self._visit is not None:
            return
        gained = self._gains([member])[0]

        def hope(k: int) -> float:
            return (1 + gained[k]) / (times[k] * (1 - self.costs.doubt(num_sequences, k)))

        k = max(range(1, len(gained)), key=hope)
        num_rounds = num_unsettled_rounds + TRIAL_ROUNDS
        gained_s = times[0] * gained[k] / num_sequences
        lost_s = round_s(times, k, 1, num_sequences) - times[0] - gained_s
        if not self.ledger.allows(num_rounds * max(lost_s, LEAST_LOSS * times[0])):
            return
        assert member.pool is not None
        member.pool.forget(TRIAL_ROUNDS)
        member.acceptance.forget()
        member.uses_draft = True
        member.num_unsettled_rounds = num_unsettled_rounds
        self._visit = trial_of(member, k, num_sequences / times[0])

    def _is_over(self, visit: Visit) -> bool:
        member = visit.member
        if visit.num_left <= 0 or visit.patience <= 0:
            return True
        if member is None:
            return not self._members
        if all(c is not member for c in self._controllers):
            return True
        tried, kept = member.acceptance.tried, member.acceptance.kept
        if tried < FEWEST_TRIAL_ROUNDS - 1:
            return False
        return (kept + 0.5 + 0.5 * sqrt(tried)) / tried < self._break_even()

    def _break_even(self) -> float:
        """Least acceptance rate, the same at all positions, at which some number of draft tokens pays."""
        times = self.costs.estimates(self._num_sequences)
        if times is None:
            return 0.0
        for percent in range(0, 100, 4):
            expected = gains([percent / 100] * (len(times) - 1), 1.0, len(times) - 1)
            if any((1 + gain) * times[0] > time for gain, time in zip(expected[1:], times[1:], strict=True)):
                return percent / 100
        return 1.0

    def _end_visit(self, visit: Visit) -> None:
        self.ledger.lost_s += visit.lost_s
        self._visit = None
        self._num_until_decision = 0
        self._regret = 0.0
        member = visit.member
        if member is None:
            return
        member.uses_draft = False
        index = next((i for i, c in enumerate(self._controllers) if c is member), None)
        if index is None:
            return  # it has ended; there may be no sequence at all
        times = self.costs.estimates(self._num_sequences)
        if times is None:
            return
        times[0] *= PLAIN_DISCOUNT
        best = self._best(self._controllers, times, self._num_sequences)
        bar = (1 + self._doubt(best.num_draft_tokens)) * self._num_sequences / times[0]
        if best.members[index] and best.tokens_per_s > bar:
            member.uses_draft = True
            self._num_draft_tokens = best.num_draft_tokens
