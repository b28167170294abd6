"""Rounds that are run to learn: how long each such visit lasts, what it has cost, and when the next may begin."""

from dataclasses import dataclass

from kimi_backend.spec_decode.controller import SpeculationController

EXPLORATION_SHARE = 0.01
"""Of all time in rounds: what visits that are not needed may lose, in all, against the choice that stood."""
GRACE_ROUNDS = 20
"""Verifies of a kind of request before a draft may be left alone for it: the first few may be unlucky."""
VISIT_ROUNDS = 3
"""Rounds at another number of draft tokens; as many as a first value needs."""
TRIAL_ROUNDS = 16
"""Settled rounds in which a sequence that did not draft does."""
FEWEST_TRIAL_ROUNDS = 6
"""After so many a hopeless trial ends."""
SETTLING_ROUNDS = 12
"""Rounds until a draft whose KV began in the middle of a sequence guesses about as well as it ever will."""


class Ledger:
    """What learning has cost, against all time."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self.lost_s = 0.0

    def allows(self, seconds: float) -> bool:
        """Whether a visit that may lose so much fits."""
        return self.lost_s + seconds <= EXPLORATION_SHARE * self.total_s


@dataclass(slots=True)
class Visit:
    """A choice that is held for some rounds, whatever is thought of it."""

    num_draft_tokens: int
    standing_rate: float
    """Tokens a second of the choice that it interrupts."""
    num_left: int = VISIT_ROUNDS
    """Rounds that shall still count."""
    patience: int = 24
    """Rounds after which it ends anyway."""
    member: SpeculationController | None = None
    """The sequence whose acceptance is tried; None where it is the rounds' cost."""
    seconds: float = 0.0
    num_tokens: float = 0.0

    @property
    def lost_s(self) -> float:
        """Time that the standing choice would have saved."""
        return max(0.0, self.seconds - self.num_tokens / self.standing_rate)


def trial_of(member: SpeculationController, num_draft_tokens: int, standing_rate: float) -> Visit:
    """A sequence drafts for a while."""
    return Visit(
        num_draft_tokens,
        standing_rate,
        num_left=TRIAL_ROUNDS,
        patience=3 * (TRIAL_ROUNDS + member.num_unsettled_rounds),
        member=member,
    )
