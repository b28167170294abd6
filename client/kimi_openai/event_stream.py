"""A reply as server-sent events: chunks, exactly one with a finish_reason or an error, then [DONE]."""

import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Protocol

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kimi_client import Chunk
from kimi_openai.errors import ApiError, deadline_passed
from kimi_openai.replies import Envelope, ReplyWriter, usage

logger = logging.getLogger("kimi_openai")

ChoiceChunk = tuple[int, Chunk]
"""(index of the choice, what came for it)."""


class UsageMode(Enum):
    """Settings of where a stream tells the usage."""

    NONE = auto()
    AT_THE_END = auto()
    """A chunk of its own without choices has it; in all others it is null."""
    CONTINUOUS = auto()
    """True tells what was used so far in every chunk too."""


class Cancellable(Protocol):
    """The work that runs on the server for a stream."""

    def cancel(self) -> None: ...


DONE = "data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Sends events while its client listens; whichever way it ends, the server's requests end with it."""

    def __init__(self, generation: Cancellable, events: AsyncIterator[str], headers: Mapping[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**HEADERS, **headers})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The events may never have been asked for: a client can leave before the first.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()


def event(value: dict[str, Any]) -> str:
    """One event. ASCII only: some clients cut lines wherever Unicode has a line break."""
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


async def chunk_events(
    chunks: AsyncIterator[ChoiceChunk],
    writers: Sequence[ReplyWriter],
    envelope: Envelope,
    usage_mode: UsageMode = UsageMode.NONE,
    *,
    choices_a_prompt: int = 1,
) -> AsyncIterator[str]:
    """All events of a reply.

    Args:
        chunks: of all choices, each choice's in order.
        writers: one a choice.
    """
    reply = _StreamedReply(writers, envelope, usage_mode, choices_a_prompt)
    try:
        for index in range(len(writers)):
            for opening in reply.opening(index):
                yield opening
        async for index, chunk in chunks:
            for written in reply.events(index, chunk):
                yield written
        for written in reply.ending():
            yield written
    except ApiError as error:
        yield event(error.body())
    except Exception:
        logger.exception("%s: the reply could not be written", envelope.reply_id)
        yield event(ApiError(500, "internal error").body())
    yield DONE


class _StreamedReply:
    """The state of one reply: what its events have said so far."""

    def __init__(
        self, writers: Sequence[ReplyWriter], envelope: Envelope, usage_mode: UsageMode, choices_a_prompt: int
    ) -> None:
        self._writers = writers
        self._envelope = envelope
        self._usage_mode = usage_mode
        self._choices_a_prompt = choices_a_prompt
        self._statistics: dict[int, dict[str, Any]] = {}
        """Statistics of the choices that have ended."""
        self._num_prompt = [0] * len(writers)
        self._num_output = [0] * len(writers)

    def opening(self, index: int) -> Iterator[str]:
        for choice in self._writers[index].opening():
            yield self._event(index, choice, {})

    def events(self, index: int, chunk: Chunk) -> Iterator[str]:
        self._num_prompt[index] += chunk.num_prompt_tokens
        self._num_output[index] += chunk.num_tokens
        more: dict[str, Any] = {"prompt_token_ids": list(chunk.prompt_token_ids)} if chunk.prompt_token_ids else {}
        for choice in self._writers[index].choices(chunk):
            if choice["finish_reason"] is not None:
                self._statistics[index] = chunk.statistics
                more = more | {"statistics": chunk.statistics}
            yield self._event(index, choice, more)

    def ending(self) -> Iterator[str]:
        if self._usage_mode is not UsageMode.NONE:
            statistics = [self._statistics[index] for index in range(len(self._writers))]
            total = usage(statistics, self._choices_a_prompt)
            yield event(self._envelope.wrap(self._writers[0].chunk_object, [], usage=total))

    def _event(self, index: int, choice: dict[str, Any], more: dict[str, Any]) -> str:
        kind = self._writers[index].chunk_object
        return event(self._envelope.wrap(kind, [{**choice, "index": index}], **self._usage_so_far(), **more))

    def _usage_so_far(self) -> dict[str, Any]:
        if self._usage_mode is UsageMode.NONE:
            return {}
        if self._usage_mode is UsageMode.AT_THE_END:
            return {"usage": None}
        prompt, output = sum(self._num_prompt[:: self._choices_a_prompt]), sum(self._num_output)
        return {
            "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
        }


async def whole_reply(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    """The same chunks, the last of which says why the reply ended.

    Raises:
        ApiError: it did not end by itself.
    """
    reason = None
    async for chunk in chunks:
        reason = chunk.finish_reason
        if reason == "cancelled" and chunk.text:
            yield dataclasses.replace(chunk, finish_reason=None)
        check_end(reason, chunk.stop_reason)
        yield chunk
    if reason is None:
        raise ApiError(500, "the server's stream ended before the reply did")


def check_end(finish_reason: str | None, why: str | int | None) -> None:
    """Pass silently unless the server cut the reply off, as it does at the request's deadline.

    Raises:
        ApiError: 408, with the server's reason.
    """
    if finish_reason == "cancelled":
        raise deadline_passed(str(why or "cancelled by the server"))
