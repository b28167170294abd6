"""The number of tokens to draft next for a request."""

from kimi_backend.spec_decode.acceptance import AcceptancePool, SequenceAcceptance
from kimi_backend.spec_decode.looked_up import LookedUp

GREEDY_TEMPERATURE = 1e-5
COOL_TEMPERATURE = 0.7


class SpeculationController:
    """Speculation of one request: at most what it asked for, never more than it can still use.

    The engine's `SpeculationPolicy` writes `uses_draft` and `num_chosen_tokens`; without one they stay at what the
    request asked for.
    """

    __slots__ = (
        "acceptance",
        "kind",
        "looked_up",
        "num_chosen_tokens",
        "num_idle_choices",
        "num_speculative_tokens",
        "num_unsettled_rounds",
        "pool",
        "repetition",
        "uses_draft",
    )

    def __init__(self, num_speculative_tokens: int, temperature: float = 1.0) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.num_chosen_tokens = num_speculative_tokens
        """Draft tokens a round, now."""
        self.uses_draft = num_speculative_tokens > 0
        """True if the draft's KV shall follow this sequence. With 0 chosen tokens the draft only extends it."""
        self.kind = (temperature >= GREEDY_TEMPERATURE) + (temperature > COOL_TEMPERATURE)
        """Requests of one kind are expected to be accepted alike: greedy, cool or warm ones."""
        self.repetition = 0
        """`SequenceLookup.repetition`: of a kind, those are expected to find alike whose prompts repeat alike."""
        self.acceptance = SequenceAcceptance()
        self.pool: AcceptancePool | None = None
        """The pool of its kind; given by the policy, if that learns."""
        self.looked_up = LookedUp()
        """The record of what its text proposes instead of the draft."""
        self.num_unsettled_rounds = 0
        """Rounds that say little of the draft, because its KV began in the middle of the sequence."""
        self.num_idle_choices = 0
        """The policy's choices in a row that took no draft token of it."""

    def num_draft_tokens(self, num_remaining_tokens: int) -> int:
        """Tokens to propose when the request may emit so many more.

        A verify of k draft tokens may emit k + 1, so the last token is never drafted: whatever is accepted fits, and
        every KV slot stays below the model's longest sequence.
        """
        return max(0, min(self.num_chosen_tokens, num_remaining_tokens - 1))

    def record(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Learn from one verify that carried draft tokens."""
        if self.pool is None:
            return
        if self.num_unsettled_rounds:
            self.num_unsettled_rounds -= 1
            return
        self.acceptance.record(num_draft_tokens, num_accepted)
        self.pool.record(num_draft_tokens, num_accepted)
