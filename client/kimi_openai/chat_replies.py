"""The bodies and chunks of /v1/chat/completions."""

import asyncio
import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from kimi_client import Chunk, Completion, TextOrigins
from kimi_client.replies.events import ArgumentsDelta, CallBegin, CallEnd, ContentDelta, Event, ReasoningDelta
from kimi_client.replies.reader import ReplyReader
from kimi_client.text_origins import Run
from kimi_openai.logprobs import ChatLogprobs, shown_prompt_logprobs
from kimi_openai.replies import shown_token_ids

SLICE_CHARS = 256
"""Characters of a whole reply that are read at once: of markers alone a twentieth of a millisecond."""
READ_S, PAUSE_S = 0.0002, 0.001
"""A reply that takes longer to read is read for so long, then leaves the loop to other requests for so long: each of
those needs many turns of the loop, and would meet a slice in every one."""

MakeReader = Callable[[bool], ReplyReader]
"""make_reader(begins_thinking) -> the reader of one reply."""


class ChatWriter:
    """Writes the choices of one chat's reply; see `ReplyWriter`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        make_reader: MakeReader,
        *,
        with_logprobs: bool,
        with_token_ids: bool,
        with_origins: bool = False,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self._make_reader = make_reader
        self._reader: ReplyReader | None = None
        self._logprobs = ChatLogprobs() if with_logprobs else None
        self._with_token_ids, self._num_prompt_logprobs = with_token_ids, num_prompt_logprobs
        self._origins = TextOrigins() if with_origins else None
        self._begun: dict[int, CallBegin] = {}
        self._num_complete = 0

    def opening(self) -> list[dict[str, Any]]:
        return [{**_choice({"role": "assistant", "content": ""}), "logprobs": None, "finish_reason": None}]

    def choices(self, chunk: Chunk) -> list[dict[str, Any]]:
        is_last = chunk.finish_reason is not None
        reader = self._reader_for(chunk)
        events = self._counted(reader.feed(chunk.text, chunk.control_offsets, is_last=is_last))
        delta = _Parts().add(events).delta()
        extras = self._extras(chunk, reader, is_last=is_last) | self._shown_origins(chunk, events)
        choices = []
        if delta or extras["logprobs"] or (self._with_token_ids and chunk.num_tokens):
            choices.append({**_choice(delta), **extras, "finish_reason": None})
        if is_last:
            choices.append({**_choice({}), "logprobs": None, **self._end(chunk)})
        return choices

    async def whole(self, completion: Completion) -> dict[str, Any]:
        reader, text, parts = self._reader_for(completion), completion.text, _Parts()
        offsets: Sequence[int] = completion.control_offsets
        end_s = time.perf_counter() + READ_S
        for start in range(0, len(text), SLICE_CHARS):
            parts.add(self._counted(reader.feed(text[start : start + SLICE_CHARS], offsets)))
            offsets = ()
            if time.perf_counter() > end_s:
                await asyncio.sleep(PAUSE_S)
                end_s = time.perf_counter() + READ_S
        parts.add(self._counted(reader.feed("", is_last=True)))
        message = parts.message(self._begun)
        extras = self._extras(completion, reader, is_last=True) | self._shown_origins(completion, parts.texts)
        return {"index": 0, "message": message, **extras, **self._end(completion)}

    def beside(self, completion: Completion) -> dict[str, Any]:
        return shown_prompt_logprobs(completion.prompt_logprobs, self._num_prompt_logprobs)

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
        """The reason why the reply ended, and its calls that nobody should make."""
        reason = "tool_calls" if source.finish_reason == "stop" and self._num_complete else source.finish_reason
        cut = [{"index": call.index, "id": call.call_id, "name": call.name} for call in self._begun.values()]
        incomplete = {"incomplete_tool_calls": cut} if cut else {}
        return {"finish_reason": reason, "stop_reason": source.stop_reason, **incomplete}


def _choice(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta}


class _Parts:
    """The additions of events to a message."""

    def __init__(self) -> None:
        self.texts: list[ReasoningDelta | ContentDelta] = []
        """Thoughts and content, in order."""
        self._calls: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, events: Iterable[Event]) -> "_Parts":
        for event in events:
            if isinstance(event, ReasoningDelta | ContentDelta):
                self.texts.append(event)
            elif isinstance(event, CallBegin):
                self._calls[event.index] = {"id": event.call_id, "type": "function", "function": {"name": event.name}}
                self._arguments[event.index] = []
            elif isinstance(event, ArgumentsDelta):
                self._calls.setdefault(event.index, {"function": {}})
                self._arguments.setdefault(event.index, []).append(event.text)
        return self

    def delta(self) -> dict[str, Any]:
        """Write it as a chunk does; a call that began in an earlier one has its arguments only."""
        delta: dict[str, Any] = {}
        if reasoning := self._text(ReasoningDelta):
            delta["reasoning_content"] = reasoning
        if content := self._text(ContentDelta):
            delta["content"] = content
        if self._calls:
            delta["tool_calls"] = [{"index": index, **self._call(index)} for index in self._calls]
        return delta

    def message(self, incomplete: Container[int]) -> dict[str, Any]:
        """Write it as a whole reply does. A call that is incomplete is left out: it must not be made."""
        content = self._text(ContentDelta)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := self._text(ReasoningDelta):
            message["reasoning_content"] = reasoning
        if calls := [self._call(index) for index in self._calls if index not in incomplete]:
            message |= {"content": content or None, "tool_calls": calls}
        return message

    def _text(self, kind: type[ReasoningDelta] | type[ContentDelta]) -> str:
        return "".join(event.text for event in self.texts if isinstance(event, kind))

    def _call(self, index: int) -> dict[str, Any]:
        call = self._calls[index]
        call["function"]["arguments"] = "".join(self._arguments[index])
        return call
