"""The bodies and chunks of /v1/chat/completions."""

import asyncio
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from kimi_client import Chunk, Completion
from kimi_client.replies.events import ArgumentsDelta, CallBegin, CallEnd, ContentDelta, Event, ReasoningDelta
from kimi_client.replies.reader import ReplyReader
from kimi_openai.logprobs import ChatLogprobs
from kimi_openai.replies import shown_token_ids
from kimi_openai.text_origins import Run, TextOrigins

SLICE_CHARS = 16_384
"""Of a whole reply that is read at once, some milliseconds at most; then other requests have their turn."""

MakeReader = Callable[[bool], ReplyReader]
"""make_reader(begins_thinking) -> the reader of one reply."""


class ChatWriter:
    """Writes the choices of one chat's reply; see `ReplyWriter`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, make_reader: MakeReader, *, with_logprobs: bool, with_token_ids: bool, with_origins: bool = False
    ) -> None:
        self._make_reader = make_reader
        self._reader: ReplyReader | None = None
        self._logprobs = ChatLogprobs() if with_logprobs else None
        self._with_token_ids = with_token_ids
        self._origins = TextOrigins() if with_origins else None
        self._begun: dict[int, CallBegin] = {}
        self._num_complete = 0

    def opening(self) -> list[dict[str, Any]]:
        return [{**_choice({"role": "assistant", "content": ""}), "logprobs": None, "finish_reason": None}]

    def choices(self, chunk: Chunk) -> list[dict[str, Any]]:
        is_last = chunk.finish_reason is not None
        reader = self._reader_for(chunk)
        events = self._counted(reader.feed(chunk.text, chunk.control_offsets, is_last=is_last))
        delta = _delta(events)
        extras = self._extras(chunk, reader, is_last=is_last) | self._shown_origins(chunk, events)
        choices = []
        if delta or extras["logprobs"] or (self._with_token_ids and chunk.num_tokens):
            choices.append({**_choice(delta), **extras, "finish_reason": None})
        if is_last:
            choices.append({**_choice({}), "logprobs": None, **self._end(chunk)})
        return choices

    async def whole(self, completion: Completion) -> dict[str, Any]:
        reader, text = self._reader_for(completion), completion.text
        offsets: Sequence[int] = completion.control_offsets
        events: list[Event] = []
        for start in range(0, len(text), SLICE_CHARS):
            events += reader.feed(text[start : start + SLICE_CHARS], offsets)
            offsets = ()
            await asyncio.sleep(0)
        events += reader.feed("", is_last=True)
        message = _message(self._counted(events), self._begun)
        extras = self._extras(completion, reader, is_last=True) | self._shown_origins(completion, events)
        return {"index": 0, "message": message, **extras, **self._end(completion)}

    def _reader_for(self, source: Chunk | Completion) -> ReplyReader:
        if self._reader is None:
            self._reader = self._make_reader(source.begins_thinking)
        return self._reader

    def _counted(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, CallBegin):
                self._begun[event.index] = event
            elif isinstance(event, CallEnd) and event.is_complete:
                del self._begun[event.index]
                self._num_complete += 1
        return events

    def _extras(self, source: Chunk | Completion, reader: ReplyReader, *, is_last: bool) -> dict[str, Any]:
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs.take(source.logprobs, reader.channels, is_last=is_last)
        return {"logprobs": logprobs, **shown_token_ids(source, self._with_token_ids)}

    def _shown_origins(self, source: Chunk | Completion, events: Iterable[Event]) -> dict[str, Any]:
        """The field that `return_token_origins` adds: runs of the thoughts and of the content."""
        if self._origins is None:
            return {}
        self._origins.add(source)
        runs: dict[str, list[Run]] = {}
        for event in events:
            if isinstance(event, ReasoningDelta | ContentDelta):
                name = "content" if isinstance(event, ContentDelta) else "reasoning_content"
                runs.setdefault(name, []).extend(self._origins.of(event.text))
        return {"text_origins": runs}

    def _end(self, source: Chunk | Completion) -> dict[str, Any]:
        """Why the reply ended, and which of its calls nobody should make."""
        reason = "tool_calls" if source.finish_reason == "stop" and self._num_complete else source.finish_reason
        cut = [{"index": call.index, "id": call.call_id, "name": call.name} for call in self._begun.values()]
        incomplete = {"incomplete_tool_calls": cut} if cut else {}
        return {"finish_reason": reason, "stop_reason": source.stop_reason, **incomplete}


def _choice(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta}


def _delta(events: Iterable[Event]) -> dict[str, Any]:
    """What a chunk adds to the message."""
    reasoning, content = _texts(events)
    delta: dict[str, Any] = {}
    if reasoning:
        delta["reasoning_content"] = reasoning
    if content:
        delta["content"] = content
    if calls := _calls(events):
        delta["tool_calls"] = [{"index": index, **call} for index, call in calls.items()]
    return delta


def _message(events: Iterable[Event], incomplete: Container[int]) -> dict[str, Any]:
    """The whole message. A call that is incomplete is left out: it must not be made."""
    reasoning, content = _texts(events)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [call for index, call in _calls(events).items() if index not in incomplete]
    if calls:
        message["content"] = content or None
        message["tool_calls"] = calls
    return message


def _texts(events: Iterable[Event]) -> tuple[str, str]:
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    return reasoning, content


def _calls(events: Iterable[Event]) -> dict[int, dict[str, Any]]:
    """Index -> what the events say of this call; one that began earlier has its arguments only."""
    calls: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, CallBegin):
            calls[event.index] = {"id": event.call_id, "type": "function", "function": {"name": event.name}}
            arguments[event.index] = []
        elif isinstance(event, ArgumentsDelta):
            calls.setdefault(event.index, {"function": {}})
            arguments.setdefault(event.index, []).append(event.text)
    for index, pieces in arguments.items():
        calls[index]["function"]["arguments"] = "".join(pieces)
    return calls
