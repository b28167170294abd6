"""Whether requests of one kind draft, for about so many sequences: from a trial to a verdict and to the next trial."""

from dataclasses import dataclass

FEWEST_ROUNDS, FEWEST_AGAIN = 12, 12
"""Verifies with draft tokens before a trial may end; rounds before one may that is not the first."""
SURENESS, LEAST_SURENESS, LEAST_AGAINST = 2.0, 0.7, 0.35
"""Standard errors that a verdict needs: at a trial's beginning, at its end, and then against the draft. What is close
to call costs little for a while, and something for ever, most where the draft loses."""
CLEAR = 1.5
"""Times SURENESS; a first verdict against the draft that is so sure counts twice."""
LONG_TRIAL = 300
"""Rounds after which a trial needs LEAST_SURENESS."""
UNTRIED_SHARE = 0.4
"""Of these standard errors, what the hope for a number of draft tokens gets that does not stand."""
FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 300, 4, 20_000
"""Rounds from the first verdict against the draft to the next trial, times this for each such verdict after another."""
READY_SHARE = 0.5
"""Of the pause, after which a sequence that starts may begin the next trial: its draft will have seen all its text."""
OVERDUE_SHARE = 1.5
"""After which sequences that run begin it, whose drafts have seen nothing of them."""


@dataclass(slots=True)
class Standing:
    """Of one kind of request and size of batch."""

    is_on: bool = True
    """Whether its requests may draft."""
    num_rounds: int = 0
    """Since that changed."""
    num_verdicts: int = 0
    """Against the draft, since one for it."""
    is_sure: bool = False
    """It is known that drafting pays."""

    @property
    def sureness(self) -> float:
        """Standard errors that a verdict for the draft needs now."""
        return self._sureness(LEAST_SURENESS)

    def _sureness(self, least: float) -> float:
        passed = min(self.num_rounds / LONG_TRIAL, 1.0)
        return SURENESS + passed * (least - SURENESS)

    @property
    def pause(self) -> int:
        """Rounds from a verdict against the draft to the next trial."""
        growth: int = PAUSE_GROWTH ** min(max(self.num_verdicts - 1, 0), 10)
        return min(FIRST_PAUSE * growth, LONGEST_PAUSE)

    @property
    def may_be_judged(self) -> bool:
        """Whether a trial has lasted long enough, as far as that is counted in rounds."""
        return self.num_verdicts == 0 or self.num_rounds >= FEWEST_AGAIN

    @property
    def is_ready(self) -> bool:
        """Whether a newcomer may begin a trial."""
        return not self.is_on and self.num_rounds >= READY_SHARE * self.pause

    @property
    def is_overdue(self) -> bool:
        """Whether anybody may."""
        return not self.is_on and self.num_rounds >= OVERDUE_SHARE * self.pause

    def begin_trial(self) -> None:
        self.is_on, self.is_sure, self.num_rounds = True, False, 0

    def judge(self, log_gains: list[tuple[float, float]], num_draft_tokens: int) -> bool:
        """Take note of what is known of a standing that is on. False if it is to be off.

        Args:
            log_gains: for each number of draft tokens the logarithm of tokens a second with its drafts over those
                without, and one standard error of it.
            num_draft_tokens: the number that stands, 1 or more.
        """
        self.is_sure = any(gain > self.sureness * doubt for gain, doubt in log_gains)
        if self.is_sure:
            self.num_verdicts = 0
        elif all(
            gain < -self._sureness(LEAST_AGAINST) * doubt * (1.0 if k == num_draft_tokens else UNTRIED_SHARE)
            for k, (gain, doubt) in enumerate(log_gains, 1)
        ):
            is_clear = all(gain < -CLEAR * SURENESS * doubt for gain, doubt in log_gains)
            self.is_on, self.num_rounds = False, 0
            self.num_verdicts += 2 if is_clear and not self.num_verdicts else 1
        return self.is_on
