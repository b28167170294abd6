"""`draft_sampling = auto`: guess with the target's noise or with the draft's argmax, whichever is accepted more.

The emitted text is the same either way, so the choice is free at every step (docs/decisions/0007).
"""

from kimi_backend.types.request import DraftSampling

GOOD_ACCEPTANCE = 0.6
"""Above this rate a coupled guess beats a greedy one for any draft we simulated; below it the two are close."""
TRIAL_POSITIONS = 64
"""Verified draft positions after which a rate is believed."""
KEEP_POSITIONS = 512
"""Verified draft positions that the winner of a trial serves before coupled guessing is measured again."""


class DraftSamplingChooser:
    """Per request: measures the share of verified draft tokens that were accepted, and picks the kind of guess."""

    def __init__(self, choice: DraftSampling) -> None:
        self._is_auto = choice is DraftSampling.AUTO
        self.is_greedy = choice is DraftSampling.GREEDY
        self._coupled_rate: float | None = None
        self._remaining = TRIAL_POSITIONS
        self._verified = 0
        self._accepted = 0

    def record(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Learn from one round. Positions behind the first rejection say nothing about the draft and do not count."""
        if not self._is_auto:
            return
        verified = min(num_accepted + 1, num_draft_tokens)
        self._verified += verified
        self._accepted += num_accepted
        self._remaining -= verified
        if self._remaining <= 0:
            self._end_phase(self._accepted / self._verified)

    def _end_phase(self, rate: float) -> None:
        """Phases: coupled trial; if weak a greedy trial; then the better of both for a longer while; and again."""
        if self._coupled_rate is not None and self.is_greedy:
            self.is_greedy = rate > self._coupled_rate
            self._begin(KEEP_POSITIONS)
            self._coupled_rate = None
        elif self._coupled_rate is None and self.is_greedy:
            self.is_greedy = False
            self._begin(TRIAL_POSITIONS)
        elif rate < GOOD_ACCEPTANCE:
            self._coupled_rate = rate
            self.is_greedy = True
            self._begin(TRIAL_POSITIONS)
        else:
            self._begin(TRIAL_POSITIONS)

    def _begin(self, num_positions: int) -> None:
        self._remaining = num_positions
        self._verified = self._accepted = 0
