"""The bodies and chunks of the API, made of what the server sends."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kimi_client import Chunk, Completion, TextOrigins
from kimi_openai.logprobs import CompletionLogprobs, shown_prompt_logprobs


def usage(statistics: Sequence[dict[str, Any]], choices_a_prompt: int = 1) -> dict[str, Any]:
    """The API's usage object from the server's statistics of a call's finished requests; a prompt counts once."""
    firsts = statistics[::choices_a_prompt]
    prompt = sum(s["num_prompt_tokens"] for s in firsts)
    output = sum(s["num_output_tokens"] for s in statistics)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(s["num_cached_tokens"] for s in firsts)},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The fields that every body and chunk of one reply repeats."""

    reply_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""

    def wrap(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """kind: the API's name of the object."""
        head = {"id": self.reply_id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


class ReplyWriter(Protocol):
    """Writes the choices of one reply, in the form of its endpoint; for one stream, or one whole completion."""

    whole_object: str
    chunk_object: str

    def opening(self) -> list[dict[str, Any]]:
        """Choices of chunks that come before any text."""

    def choices(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Choices of the chunks that this one becomes; exactly one of all has a finish_reason."""

    async def whole(self, completion: Completion) -> dict[str, Any]:
        """The choice of a reply in one body."""

    def beside(self, completion: Completion) -> dict[str, Any]:
        """Return what the endpoint adds beside that choice."""


class CompletionWriter:
    """The writer of /v1/completions."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        *,
        num_logprobs: int | None,
        with_token_ids: bool,
        with_origins: bool = False,
        echoes: bool = False,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self._logprobs = None if num_logprobs is None else CompletionLogprobs(num_logprobs)
        self._echoes, self._num_prompt_logprobs = echoes, num_prompt_logprobs
        self._with_token_ids = with_token_ids
        self._origins = TextOrigins() if with_origins else None

    def opening(self) -> list[dict[str, Any]]:
        return []

    def choices(self, chunk: Chunk) -> list[dict[str, Any]]:
        # Also of a chunk that shows nothing: its tokens' text may come with the next.
        origins = self._shown_origins(chunk)
        has_more = chunk.num_tokens and (self._logprobs is not None or self._with_token_ids)
        if chunk.text or has_more or chunk.finish_reason is not None:
            return [self._choice(chunk) | origins]
        return []

    async def whole(self, completion: Completion) -> dict[str, Any]:
        scores = shown_prompt_logprobs(completion.prompt_logprobs, self._num_prompt_logprobs)
        return self._choice(completion) | self._shown_origins(completion) | scores

    def beside(self, completion: Completion) -> dict[str, Any]:
        return {}

    def _choice(self, source: Chunk | Completion) -> dict[str, Any]:
        prompt = source.prompt_logprobs if self._echoes else ()
        return {
            "index": 0,
            "text": source.text,
            "logprobs": None if self._logprobs is None else self._logprobs.take([*prompt, *source.logprobs]),
            **shown_token_ids(source, self._with_token_ids),
            "finish_reason": source.finish_reason,
            "stop_reason": source.stop_reason,
        }

    def _shown_origins(self, source: Chunk | Completion) -> dict[str, Any]:
        if self._origins is None:
            return {}
        self._origins.add(source)
        return {"text_origins": {"text": self._origins.of(source.text)}}


def shown_token_ids(source: Chunk | Completion, is_wanted: bool) -> dict[str, Any]:
    """The field that `return_token_ids` adds to a choice."""
    return {"token_ids": list(source.token_ids)} if is_wanted else {}
