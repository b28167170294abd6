"""What the server sends -> the bodies and chunks of the API."""

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from kimi_client import Chunk, Completion
from kimi_openai.logprobs import CompletionLogprobs, chat_logprobs
from kimi_openai.reply_splitter import ReplyPart, ReplySplitter, ToolCall


def usage(statistics: dict[str, Any]) -> dict[str, Any]:
    """The API's usage object from the server's statistics of a finished request."""
    prompt, output = statistics["num_prompt_tokens"], statistics["num_output_tokens"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": statistics["num_cached_tokens"]},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What every body and chunk of one reply repeats."""

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

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The choice of a reply in one body."""


class ChatWriter:
    """Of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, splitter: ReplySplitter, *, with_logprobs: bool, with_token_ids: bool) -> None:
        self._splitter = splitter
        self._with_logprobs = with_logprobs
        self._with_token_ids = with_token_ids
        self._num_calls = 0

    def opening(self) -> list[dict[str, Any]]:
        return [self._choice({"role": "assistant", "content": ""}, None)]

    def choices(self, chunk: Chunk) -> list[dict[str, Any]]:
        is_last = chunk.finish_reason is not None
        delta = self._delta(self._splitter.feed(chunk.text, is_last=is_last))
        choices = []
        if delta or (chunk.num_tokens and (self._with_logprobs or self._with_token_ids)):
            choices.append(self._choice(delta, chunk))
        if is_last:
            end = {"finish_reason": self._reason(chunk.finish_reason), "stop_reason": chunk.stop_reason}
            choices.append(self._choice({}, None) | end)
        return choices

    def whole(self, completion: Completion) -> dict[str, Any]:
        part = self._splitter.feed(completion.text, is_last=True)
        message: dict[str, Any] = {"role": "assistant", "content": part.content, "refusal": None}
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
        if part.tool_calls:
            message["content"] = part.content if part.content.strip() else None
            message["tool_calls"] = [_call(call) for call in part.tool_calls]
            self._num_calls = len(part.tool_calls)
        return {
            "index": 0,
            "message": message,
            **self._extras(completion),
            "finish_reason": self._reason(completion.finish_reason),
            "stop_reason": completion.stop_reason,
        }

    def _choice(self, delta: dict[str, Any], chunk: Chunk | None) -> dict[str, Any]:
        extras = {"logprobs": None} if chunk is None else self._extras(chunk)
        return {"index": 0, "delta": delta, **extras, "finish_reason": None}

    def _extras(self, source: Chunk | Completion) -> dict[str, Any]:
        logprobs = chat_logprobs(source.logprobs) if self._with_logprobs else None
        return {"logprobs": logprobs, **_token_ids(source, self._with_token_ids)}

    def _delta(self, part: ReplyPart) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.content:
            delta["content"] = part.content
        if part.tool_calls:
            first, self._num_calls = self._num_calls, self._num_calls + len(part.tool_calls)
            delta["tool_calls"] = [{"index": first + i, **_call(call)} for i, call in enumerate(part.tool_calls)]
        return delta

    def _reason(self, finish_reason: str | None) -> str | None:
        return "tool_calls" if finish_reason == "stop" and self._num_calls else finish_reason


class CompletionWriter:
    """Of /v1/completions."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, *, with_logprobs: bool, with_token_ids: bool) -> None:
        self._logprobs = CompletionLogprobs() if with_logprobs else None
        self._with_token_ids = with_token_ids

    def opening(self) -> list[dict[str, Any]]:
        return []

    def choices(self, chunk: Chunk) -> list[dict[str, Any]]:
        has_more = chunk.num_tokens and (self._logprobs is not None or self._with_token_ids)
        if chunk.text or has_more or chunk.finish_reason is not None:
            return [self._choice(chunk)]
        return []

    def whole(self, completion: Completion) -> dict[str, Any]:
        return self._choice(completion)

    def _choice(self, source: Chunk | Completion) -> dict[str, Any]:
        return {
            "index": 0,
            "text": source.text,
            "logprobs": None if self._logprobs is None else self._logprobs.take(source.logprobs),
            **_token_ids(source, self._with_token_ids),
            "finish_reason": source.finish_reason,
            "stop_reason": source.stop_reason,
        }


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _token_ids(source: Chunk | Completion, is_wanted: bool) -> dict[str, Any]:
    return {"token_ids": list(source.token_ids)} if is_wanted else {}
