"""Limits that the scheduler keeps, checked once."""

from dataclasses import dataclass, replace

from kimi_backend.errors import ConfigError
from kimi_backend.spec_decode.policy import PolicyName
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """The limits of one step and of the queue; the runners' own limits lower these at the handshake.

    Raises:
        ConfigError: a value out of range.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    """Rows of one step. At least max_num_seqs, so that every running sequence gets a row in every step."""
    max_prompt_tokens_beside_decode: int = 512
    """Rows of prompts in a step in which a sequence decodes, which waits for them; 0: as many as there is room for."""
    max_queue_size: int = 1024
    """Requests that may wait for their first step."""
    num_speculative_tokens: int = 3
    """k of a request that names none, where nobody chooses."""
    max_speculative_tokens: int = MAX_SPECULATIVE_TOKENS
    """Largest k that a request may ask for."""
    proposer: Proposer = Proposer.EAGLE3
    """That of a request which names none, and the most that one may name. Without a draft EAGLE3 is nobody."""
    lookup_min_match: int = 4
    """Tokens that stand again before what followed them is proposed."""
    lookup_memory_bytes: int = 1 << 30
    """Host memory of the indexes of all sequences; one that finds no room goes on without."""
    lookup_pool_bytes: int = 0
    """Host memory of the texts of ended requests, in which others of their cache salt look up too; 0: none are kept."""
    draft_max_positions: int = 0
    """A sequence of so many tokens goes on without the draft, which may not be trained for more; 0: no bound."""
    speculation_policy: PolicyName = PolicyName.FIXED
    """The chooser of k, up to what a request asks for: nobody, or the engine by what it measures."""
    enable_prefix_cache: bool = True
    async_scheduling: bool = True
    """True if steps are sent before the host knows what the step before left for them on the device, where it can."""

    def __post_init__(self) -> None:
        _require("max_num_seqs", self.max_num_seqs, 1)
        _require("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs)
        _require("max_prompt_tokens_beside_decode", self.max_prompt_tokens_beside_decode, 0)
        _require("max_queue_size", self.max_queue_size, 1)
        _require("lookup_min_match", self.lookup_min_match, 1)
        _require("lookup_memory_bytes", self.lookup_memory_bytes, 0)
        _require("lookup_pool_bytes", self.lookup_pool_bytes, 0)
        _require("draft_max_positions", self.draft_max_positions, 0)
        _require("max_speculative_tokens", self.max_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        _require("num_speculative_tokens", self.num_speculative_tokens, 0, self.max_speculative_tokens)

    @property
    def largest_k(self) -> int:
        """The most draft tokens for a request that names no number."""
        is_chosen = self.speculation_policy is PolicyName.ADAPTIVE and self.num_speculative_tokens > 0
        return self.max_speculative_tokens if is_chosen else self.num_speculative_tokens

    def lowered_to(self, max_num_seqs: int, max_num_batched_tokens: int) -> "SchedulerSettings":
        """The same settings with a step's two limits replaced."""
        return replace(self, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)


def _require(name: str, value: int, minimum: int, maximum: int | None = None) -> None:
    if value < minimum or (maximum is not None and value > maximum):
        allowed = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
        raise ConfigError(f"setting {name}: {value} given, {allowed} is allowed")
