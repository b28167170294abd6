"""The replies: chunks while a request runs, a completion when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw log-probability of one emitted token, and of the most likely ones there."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most likely first."""
    token: str = ""
    """Its text alone; U+FFFD stands for bytes that are no whole character."""
    top_tokens: tuple[str, ...] = ()
    """The texts of `top`, likewise."""


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Raw log-probability of one prompt token, and of the most likely ones there."""

    token_id: int
    logprob: float | None
    """None for the first token, which nothing precedes."""
    rank: int | None
    """1 for the most likely token; None likewise."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most likely first."""
    token: str = ""
    """Its text alone, as in `TokenLogprob`."""
    top_tokens: tuple[str, ...] = ()
    """The texts of `top`, likewise."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response of a stream: what was added since the last one."""

    text: str
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    """stop, length or cancelled in the last chunk."""
    stop_reason: str | int | None = None
    """The stop text or token id that matched, or why it was cancelled."""
    statistics: dict[str, Any] = field(default_factory=dict)
    """The last chunk's: usage, times, speculation."""
    num_prompt_tokens: int = 0
    """The first chunk's; 0 in all others."""
    prompt_token_ids: tuple[int, ...] = ()
    """The first chunk's, with `return_token_ids=True`."""
    token_origins: tuple[int, ...] = ()
    """The origin of each token, with `return_token_origins=True`: 0 drawn by the target alone, 1 accepted from the
    draft, 2 from what stood in the text before."""
    token_offsets: tuple[int, ...] = ()
    """Characters of the whole text before its own, for each token, with it too."""
    control_offsets: tuple[int, ...] = ()
    """The places where control tokens show, in characters of the whole text, with `return_control_offsets=True`."""
    begins_thinking: bool = False
    """The first chunk's, likewise: the prompt ends inside a think block."""
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    """The first chunk's, with `prompt_logprobs=n`: one for each prompt token."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request."""

    text: str
    finish_reason: str
    stop_reason: str | int | None
    num_output_tokens: int
    token_ids: tuple[int, ...]
    """Empty unless `return_token_ids=True`."""
    logprobs: tuple[TokenLogprob, ...]
    statistics: dict[str, Any]
    prompt_token_ids: tuple[int, ...] = ()
    """Empty unless `return_token_ids=True`."""
    token_origins: tuple[int, ...] = ()
    """Empty unless `return_token_origins=True`; see `Chunk`."""
    token_offsets: tuple[int, ...] = ()
    """Empty unless `return_token_origins=True`."""
    control_offsets: tuple[int, ...] = ()
    """Empty unless `return_control_offsets=True`: characters of the text before each control token that shows in it."""
    begins_thinking: bool = False
    """The prompt ends inside a think block; False unless likewise."""
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    """Empty unless `prompt_logprobs=n`; see `Chunk`."""

    @property
    def speculation(self) -> dict[str, Any] | None:
        """Acceptance of this request's draft tokens; None when speculation did not run."""
        speculation: dict[str, Any] | None = self.statistics.get("speculative_decoding")
        return speculation


def join_chunks(chunks: Sequence[Chunk]) -> Completion:
    """All chunks of one request, the last of which says why it ended."""
    last = chunks[-1]
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        finish_reason=last.finish_reason or "",
        stop_reason=last.stop_reason,
        num_output_tokens=sum(chunk.num_tokens for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        statistics=last.statistics,
        prompt_token_ids=chunks[0].prompt_token_ids,
        token_origins=tuple(origin for chunk in chunks for origin in chunk.token_origins),
        token_offsets=tuple(offset for chunk in chunks for offset in chunk.token_offsets),
        control_offsets=tuple(offset for chunk in chunks for offset in chunk.control_offsets),
        begins_thinking=chunks[0].begins_thinking,
        prompt_logprobs=chunks[0].prompt_logprobs,
    )
