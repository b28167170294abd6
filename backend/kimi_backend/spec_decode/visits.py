"""Rounds that are run to learn what they cost, and when the next may begin."""

from dataclasses import dataclass

VISIT_ROUNDS = 4
"""Rounds of a visit that count."""
PATIENCE = 12
"""Rounds after which it ends anyway."""
DENSE_GAP, NUM_DENSE = 6, 24
"""Rounds between visits to no draft while it is not known whether drafting pays, and so many of them for each size."""
SPARSE_GAP = 40
"""Rounds between further such visits."""
CHECKS_PER_VISIT = 3
"""Visits to no draft after another, at most, while another number waits for one."""
FIRST_CHECK, LONGEST_CHECK = 50, 1000
"""Rounds to the first visit to no draft once it is known; each time four times as many, up to the latter."""
FIRST_REAL, FIRST_REAL_AHEAD, REAL_GROWTH = 100, 200, 3
"""Rounds that drafted until the draft is left for the time of a visit, where it is still open whether it pays and only
what following costs is in doubt; sooner where the engine launches ahead, since nothing else tells what rounds without
a draft take there; and how many times as many until the next such visit."""
EXPLORATION_SHARE = 0.01
"""Of all rounds: what visits to other numbers of draft tokens may lose."""
FIRST_ALLOWANCE = 3.0
"""Rounds that they may lose besides."""
LEAST_LOSS = 0.05
"""Part of such a visit's rounds that it is taken to lose at least."""


@dataclass(slots=True)
class Visit:
    """Another number of draft tokens for a few rounds."""

    num_draft_tokens: int
    leaves_draft: bool = False
    """Whether nobody drafts; else who drafts follows on."""
    num_left: int = VISIT_ROUNDS
    patience: int = PATIENCE

    @property
    def is_over(self) -> bool:
        return self.num_left <= 0 or self.patience <= 0


@dataclass(slots=True)
class Visits:
    """The book of one size of batch."""

    num_rounds: int = 0
    """In which somebody drafted."""
    num_lost: float = 0.0
    """Rounds' worth of tokens that visits to other numbers have cost."""
    num_checks: int = 0
    """Visits to no draft."""
    since_check: int = 0
    since_visit: int = 0
    check_gap: int = FIRST_CHECK
    checks_since_visit: int = 0
    num_real: int = 0
    """Visits that left the draft."""

    def pass_round(self) -> None:
        self.num_rounds += 1
        self.since_check += 1
        self.since_visit += 1

    def wants_check(self, is_open: bool) -> bool:
        """Whether it is time for a visit to no draft. is_open: it is not known whether drafting pays."""
        gap = self.check_gap
        if is_open:
            gap = min(gap, DENSE_GAP if self.num_checks < NUM_DENSE else SPARSE_GAP)
        return self.since_check >= gap

    def begin_check(self, is_open: bool) -> Visit:
        """A visit to no draft."""
        self.num_checks += 1
        self.since_check = self.since_visit = 0
        self.checks_since_visit += 1
        if not is_open:
            self.check_gap = min(4 * self.check_gap, LONGEST_CHECK)
        return Visit(0)

    def wants_real_check(self, is_ahead: bool) -> bool:
        """Whether it is time for a visit that leaves the draft, if one is needed.

        Args:
            is_ahead: the engine launches ahead.
        """
        gap: int = (FIRST_REAL_AHEAD if is_ahead else FIRST_REAL) * REAL_GROWTH**self.num_real
        return self.num_rounds >= gap

    def begin_real_check(self) -> Visit:
        """A visit that leaves the draft. It costs more than its rounds: drafts begin anew after it."""
        self.num_real += 1
        self.since_check = self.since_visit = 0
        return Visit(0, leaves_draft=True, num_left=2 * VISIT_ROUNDS, patience=2 * PATIENCE)

    @property
    def is_visits_turn(self) -> bool:
        """Whether another number comes before the next visit to no draft, or it would never come."""
        return self.checks_since_visit >= CHECKS_PER_VISIT

    def begin_visit(self, num_draft_tokens: int, loss: float) -> Visit | None:
        """To another number of draft tokens, if what it may lose fits.

        Args:
            loss: part of the tokens a second that are expected to be missed there.
        """
        cost = (VISIT_ROUNDS + 1) * max(loss, LEAST_LOSS)
        if self.since_visit < DENSE_GAP or self.num_lost + cost > FIRST_ALLOWANCE + EXPLORATION_SHARE * self.num_rounds:
            return None
        self.num_lost += cost
        self.since_visit = 0
        self.checks_since_visit = 0
        return Visit(num_draft_tokens)
