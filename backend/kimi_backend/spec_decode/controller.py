"""How many tokens to draft next for a request, and how."""

from kimi_backend.spec_decode.draft_sampling import DraftSamplingChooser
from kimi_backend.types.request import DraftSampling


class SpeculationController:
    """Speculation of one request: at most what it asked for, never more than it can still use."""

    def __init__(self, num_speculative_tokens: int, draft_sampling: DraftSampling) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._chooser = DraftSamplingChooser(draft_sampling)

    @property
    def is_greedy(self) -> bool:
        """Whether the draft shall propose its argmax instead of its coupled sample."""
        return self._chooser.is_greedy

    def num_draft_tokens(self, num_remaining_tokens: int) -> int:
        """Tokens to propose when the request may emit so many more.

        A verify of k draft tokens may emit k + 1, so the last token is never drafted: whatever is accepted fits, and
        every KV slot stays below the model's longest sequence.
        """
        return max(0, min(self.num_speculative_tokens, num_remaining_tokens - 1))

    def record(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Learn from one verify that carried draft tokens."""
        self._chooser.record(num_draft_tokens, num_accepted)
