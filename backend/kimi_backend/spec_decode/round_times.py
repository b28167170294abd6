"""The time of a round: what was measured of both models' steps once, and how far off that is by now."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kimi_backend.spec_decode.step_times import Floats, Ints, Numbers, StepShape, StepTimes
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS
from kimi_backend.types.step_costs import StepCosts

FEWEST_ROUNDS_LEARNED_FROM = 30
"""A round moves what is known by one part of the rounds before it, and never by less than one of so many."""
FIRST_WEIGHT = 4
"""Rounds that what was measured before counts for: one that is held up must not turn all."""
LARGEST_SURPRISE = 0.3
"""A round counts as at most so far from what was expected, whatever held it up, and so does each part of it."""
FIRST_WAY = 0.5
"""The way to the draft until it has been seen, of the rest of the host's time."""
OWN_SHARE = 0.2
"""The share by which each factor moves alone, beside what moves all: a clock is the likelier cause."""
LEAST_FACTOR, MOST_FACTOR = 0.2, 5.0
BASE, ROWS, DRAFT = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A round of decode rows alone, as it was."""

    target: StepShape
    draft: StepShape | None
    """The draft's step that the round waited for."""
    total_s: float
    """The time from the plan to the end."""
    target_s: float
    """The target's own time; where the round is overlapped, that from its launch to its reply."""
    draft_s: float
    """The draft's way, likewise; 0 where nobody waits for its reply."""
    draft_wait_s: float
    """That, and the way to the draft and back."""
    is_overlapped: bool
    """The host plans and commits while the device works, and nothing but the whole is known."""


class RoundTimes:
    """Seconds of rounds. What is learned are three factors and the host's time, from rounds that run anyway."""

    def __init__(self, target: StepCosts, draft: StepCosts | None) -> None:
        """draft: None where there is none, and rounds are `plain` or `verifying` ones."""
        self._target = StepTimes(target)
        self._draft = None if draft is None else StepTimes(draft)
        self._last_draft_s = 0.0
        """The seconds that the draft's step of the last round is expected to have taken."""
        self._factors = [1.0, 1.0, 1.0]
        """Factors on a target's step with one row a sequence, on its other rows, whose experts may overlap more or less
        than those of random tokens, and on the draft's steps. The card's clock moves all."""
        self._is_overlapped = False
        self._host_s = 0.0
        self._way_share = FIRST_WAY
        """The way to the draft, of the rest of the host's time: what slows one slows the other, and only that one is
        seen while nobody drafts."""
        self._num_rounds = self._num_ways = 0

    @property
    def factors(self) -> list[float]:
        """The factors by which the table is off by now, of a target's step, its further rows, and the draft."""
        return [round(value, 4) for value in self._factors]

    @property
    def is_overlapped(self) -> bool:
        """True if the host's time was hidden in the last round."""
        return self._is_overlapped

    def assume_overlapped(self, host_s: float = 0.0) -> None:
        """Assume, until a round says otherwise, that the host's time is hidden as far as it can be."""
        self._is_overlapped, self._host_s = True, host_s

    def plain(
        self, num_seqs: int, num_context_tokens: int, num_looked_up: float = 0.0, looked_up_share: float = 0.0
    ) -> float:
        """A round in which nobody drafts.

        Args:
            num_looked_up: tokens of matches under verification, on the average over all rounds.
            looked_up_share: the share of rounds that have some.
        """
        target_s = self._target_step(num_seqs, num_seqs, 1, num_context_tokens)
        alone_s = self._without_draft(target_s, self._is_overlapped)
        if not looked_up_share:
            return float(alone_s)
        num_rows = num_seqs + num_looked_up / looked_up_share
        target_s = self._target_step(num_seqs, num_rows, MAX_SPECULATIVE_TOKENS + 1, num_context_tokens)
        return float(alone_s + looked_up_share * (self._without_draft(target_s, False) - alone_s))

    def verifying(
        self,
        num_seqs: int,
        num_rows: Ints,
        longest: Ints,
        num_context_tokens: int,
        *,
        is_drafting: bool,
        overlaps_next: bool,
    ) -> Numbers:
        """[J] rounds with so many rows of the target, [J], at most `longest` of a sequence.

        Args:
            is_drafting: the draft does in them what it did in the last round.
            overlaps_next: the host's time is hidden where each sequence has one row: what it looks up further ones by
                is the reply to the step before.
        """
        target_s = self._target_step(num_seqs, num_rows, longest, num_context_tokens)
        if not is_drafting:
            return self._without_draft(target_s, overlaps_next & (num_rows == num_seqs))
        beside_s = self._last_draft_s + self._host_s * (1 + self._way_share)
        if self._is_overlapped:
            beside_s = max(self._last_draft_s, self._host_s)
        return target_s + beside_s

    def _without_draft(self, target_s: Numbers, is_hidden: bool | npt.NDArray[np.bool_]) -> Floats:
        """Rounds of the target alone. is_hidden: the host works beside the device."""
        found: Floats = np.where(is_hidden, np.maximum(target_s, self._host_s), target_s + self._host_s)
        return found

    def drafting(
        self,
        num_seqs: int,
        num_drafting: int | Ints,
        depth: int | Ints,
        rows: Numbers | Ints,
        kept: Numbers,
        num_context_tokens: int,
        resting: Floats | None = None,
    ) -> Numbers:
        """Rounds in which the draft proposes something. Arguments broadcast.

        Args:
            num_drafting: sequences that use the draft, 1 or more.
            depth: tokens that it proposes, 1 or more.
            rows: draft tokens under verification, and looked-up ones.
            kept: those of them that are expected to be kept.
            resting: share of rounds whose single-row steps all rest; None: of none.
        """
        target_s = self._target_step(num_seqs, num_seqs + rows, depth + 1, num_context_tokens)
        extended = num_drafting + (rows if self._is_overlapped else kept)
        context_len = num_context_tokens / num_seqs
        draft_s = self._draft_step(num_drafting, extended, depth, context_len)
        if resting is not None:
            draft_s = draft_s + resting * (self._draft_step(num_drafting, extended, 1, context_len) - draft_s)
        draft_s = draft_s * self._factors[DRAFT]
        if self._is_overlapped:
            overlapped: Floats = target_s + np.maximum(draft_s, self._host_s)
            return overlapped
        return target_s + draft_s + self._host_s * (1 + self._way_share)

    def _target_step(
        self, num_seqs: int, num_rows: Numbers | Ints, longest: int | Ints, num_context_tokens: int
    ) -> Numbers:
        self._reach(num_seqs)
        base, more = self._target.fixed_and_variable(num_seqs, num_rows, longest, num_context_tokens / num_seqs)
        return base * self._factors[BASE] + more * self._factors[ROWS]

    def _draft_step(self, num_seqs: int | Ints, rows: Numbers | Ints, depth: int | Ints, context_len: float) -> Numbers:
        """The caller has reached so many sequences."""
        assert self._draft is not None
        fixed, more = self._draft.fixed_and_variable(num_seqs, rows, 1 + depth * self._is_overlapped, context_len)
        return fixed + more + self._draft.proposals(num_seqs, depth, context_len)

    def _reach(self, num_seqs: int) -> None:
        self._target.reach(num_seqs)
        if self._draft is not None:
            self._draft.reach(num_seqs)

    def learn(self, done: Round) -> None:
        """Move the factors towards one round."""
        self._num_rounds += 1
        rate = _rate_of(self._num_rounds)
        self._is_overlapped = done.is_overlapped
        target, draft = done.target, done.draft
        self._reach(target.num_seqs if draft is None else max(target.num_seqs, draft.num_seqs))
        context_len = target.num_context_tokens / target.num_seqs
        base, more = self._target.fixed_and_variable(target.num_seqs, target.num_rows, target.longest, context_len)
        of_draft = 0.0
        if draft is not None:
            context_len = draft.num_context_tokens / draft.num_seqs
            of_draft = float(self._draft_step(draft.num_seqs, draft.num_rows, draft.num_proposals, context_len))
        parts = [float(base), float(more), of_draft]
        self._last_draft_s = of_draft * self._factors[DRAFT]
        if done.is_overlapped:
            self._learn_overlapped(parts, done, rate)
            return
        steps_s = self._expected(parts)
        self._learn_host(done.total_s - done.target_s - done.draft_wait_s, steps_s, rate)
        self._fit([*parts[:DRAFT], 0.0], done.target_s, rate)
        if draft is None:
            return
        self._fit([0.0, 0.0, of_draft], done.draft_s, rate)
        self._num_ways += 1
        way_s = self._way_share * self._host_s
        surprise = _bounded(done.draft_wait_s - done.draft_s - way_s, steps_s + self._host_s)
        moved_s = way_s + _rate_of(self._num_ways) * surprise
        self._way_share = max(moved_s, 0.0) / self._host_s if self._host_s > 0 else FIRST_WAY

    def _learn_host(self, seconds: float, steps_s: float, rate: float) -> None:
        """steps_s: what both models' steps were expected to take in the round."""
        surprise = _bounded(seconds - self._host_s, steps_s + self._host_s)
        self._host_s = max(self._host_s + (rate if self._host_s else 1.0) * surprise, 0.0)

    def _learn_overlapped(self, parts: list[float], done: Round, rate: float) -> None:
        """Only a round in which the device never waits for the host tells of the device."""
        of_target, of_draft = self._expected([*parts[:DRAFT], 0.0]), parts[DRAFT] * self._factors[DRAFT]
        host_s = done.total_s - done.target_s
        if host_s < (of_target if done.draft is None else of_draft):
            self._fit(parts, done.total_s, rate)
        elif done.draft is not None:
            host_s = done.total_s - of_target  # a launch takes a while until the device begins
        self._learn_host(host_s, of_target + of_draft, rate)

    def _expected(self, parts: list[float]) -> float:
        return sum(part * factor for part, factor in zip(parts, self._factors, strict=True))

    def _fit(self, parts: list[float], seconds: float, rate: float) -> None:
        """Move the factors so that they explain one time better: above all together, as with a clock, and a little each
        by the part that it has."""
        weights = [part * factor for part, factor in zip(parts, self._factors, strict=True)]
        expected = sum(weights)
        if expected <= 0:
            return
        directions = [expected + OWN_SHARE * weight for weight in weights]
        scale = sum(weight * direction for weight, direction in zip(weights, directions, strict=True))
        step = rate * _bounded(seconds - expected, expected) / scale
        for place, direction in enumerate(directions):
            moved = self._factors[place] * (1 + step * direction)
            self._factors[place] = min(max(moved, LEAST_FACTOR), MOST_FACTOR)


def _rate_of(num_rounds: int) -> float:
    """The share by which the last of so many rounds counts."""
    return max(1 / (num_rounds + FIRST_WEIGHT), 1 / FEWEST_ROUNDS_LEARNED_FROM)


def _bounded(surprise_s: float, expected_s: float) -> float:
    return min(max(surprise_s, -LARGEST_SURPRISE * expected_s), LARGEST_SURPRISE * expected_s)
