"""A reply as server-sent events: chunks, exactly one with a finish_reason or an error, then [DONE]."""

import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kimi_client import Chunk, KimiClientError
from kimi_client.aio import AsyncStream
from kimi_openai.errors import ApiError, from_client_error, timed_out
from kimi_openai.replies import Envelope, ReplyWriter, usage

logger = logging.getLogger("kimi_openai")

DONE = "data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Sends events while its client listens; whichever way it ends, the server's request ends with it."""

    def __init__(self, stream: AsyncStream, events: AsyncIterator[str], headers: Mapping[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**HEADERS, **headers})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The events may never have been asked for: a client can leave before the first.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.cancel()


def event(value: dict[str, Any]) -> str:
    """One event. ASCII only: some clients cut lines wherever Unicode has a line break."""
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


async def chunk_events(
    chunks: AsyncIterator[Chunk],
    writer: ReplyWriter,
    envelope: Envelope,
    names: Mapping[str, str],
    *,
    includes_usage: bool,
) -> AsyncIterator[str]:
    """All events of a reply.

    Args:
        names: see `from_client_error`.
        includes_usage: one more chunk, without choices, has the usage; in all others it is null.
    """
    no_usage = {"usage": None} if includes_usage else {}
    try:
        for choice in writer.opening():
            yield event(envelope.wrap(writer.chunk_object, [choice], **no_usage))
        async for chunk in whole_reply(chunks):
            more: dict[str, Any] = no_usage
            if chunk.prompt_token_ids:
                more = more | {"prompt_token_ids": list(chunk.prompt_token_ids)}
            for choice in writer.choices(chunk):
                if choice["finish_reason"] is not None:
                    more = more | {"statistics": chunk.statistics}
                yield event(envelope.wrap(writer.chunk_object, [choice], **more))
            if includes_usage and chunk.finish_reason is not None:
                yield event(envelope.wrap(writer.chunk_object, [], usage=usage(chunk.statistics)))
    except KimiClientError as error:
        yield event(from_client_error(error, names).body())
    except ApiError as error:
        yield event(error.body())
    except Exception:
        logger.exception("%s: the reply could not be written", envelope.reply_id)
        yield event(ApiError(500, "internal error").body())
    yield DONE


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
        ApiError: 504, with the server's reason.
    """
    if finish_reason == "cancelled":
        raise timed_out(str(why or "cancelled by the server"))
