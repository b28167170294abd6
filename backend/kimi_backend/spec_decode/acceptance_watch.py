"""Notices a draft whose first tokens are no longer taken: what fails nothing and shows in no error."""

from kimi_backend.types.request import SpeculationStats

START_ROUNDS = 48
"""A first verdict: a draft that fits has more than NEAR_CHANCE of so few accepted, whatever the prompts."""
WINDOW_ROUNDS = 1_000
NEAR_CHANCE = 0.1
"""Share of first draft tokens that are accepted. Drafts that fit have 0.4 to 0.9, a wrong one a few per cent."""
FAR_BELOW = 0.5
"""The share of the draft's own past below which the alarm is raised."""
BACK_AT = 0.7
"""The share of its past at which the alarm ends, higher so that it does not flutter."""
PAST_WEIGHT = 0.1
"""The weight of a window in the running mean of the past."""
WINDOWS_OF_A_PAST = 3


class AcceptanceWatch:
    """Judges windows of rounds by the share of their first draft tokens that were accepted.

    Rounds and no seconds make a window: a policy that lets few sequences draft takes longer to fill one.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        """The reason why acceptance is not what it should be; None while it is."""
        self._drafted = self._accepted = 0
        self._num_windows = 0
        self._past = 0.0

    def update(self, totals: SpeculationStats | None) -> bool:
        """Look at the engine's totals so far. True when `problem` has come, gone or changed its kind."""
        if totals is None or not totals.drafted_per_position:
            return False
        drafted, accepted = totals.drafted_per_position[0], totals.accepted_per_position[0]
        rounds = drafted - self._drafted
        if rounds < (WINDOW_ROUNDS if self._num_windows else START_ROUNDS):
            return False
        share = (accepted - self._accepted) / rounds
        self._drafted, self._accepted = drafted, accepted
        had_problem = self.problem is not None
        self.problem = self._judge(share, rounds, had_problem)
        self._num_windows += 1
        if self.problem is None:
            weight = max(PAST_WEIGHT, 1 / self._num_windows)
            self._past += weight * (share - self._past)
        return had_problem != (self.problem is not None)

    def _judge(self, share: float, rounds: int, had_problem: bool) -> str | None:
        found = f"{share:.1%} of the first draft tokens of {rounds} rounds were accepted"
        if share < NEAR_CHANCE:
            return f"{found}, which is near chance: the draft does not fit, or is read with wrong settings"
        limit = (BACK_AT if had_problem else FAR_BELOW) * self._past
        if self._num_windows >= WINDOWS_OF_A_PAST and share < limit:
            return f"{found}, far below its past {self._past:.1%}: other traffic than before, or another draft"
        return None
