"""One running request of the server, and the two ways to answer with it."""

from collections.abc import AsyncIterator, Mapping

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response

from kimi_client import Chunk, KimiClientError
from kimi_client.aio import AsyncKimiClient
from kimi_openai.connection import while_connected
from kimi_openai.errors import from_client_error
from kimi_openai.event_stream import EventStream, check_end, chunk_events
from kimi_openai.replies import Envelope, ReplyWriter, usage
from kimi_openai.server_fields import ServerRequest

REQUEST_ID_HEADER = "X-Request-Id"


class Generation:
    """A client that leaves ends it on the server too."""

    def __init__(self, client: AsyncKimiClient, asked: ServerRequest, *, is_streamed: bool) -> None:
        """Starts the request.

        Raises:
            ApiError: a value that the client library cannot send.
        """
        self._names: Mapping[str, str] = asked.names
        try:
            self._stream = client.stream(stream=is_streamed, **asked.fields)
        except KimiClientError as error:
            raise from_client_error(error, asked.names) from None
        self._chunks = aiter(self._stream)

    @property
    def request_id(self) -> str:
        """What the server's log calls it."""
        return self._stream.request_id

    async def answer_whole(self, request: Request, writer: ReplyWriter, envelope: Envelope) -> Response:
        """One body.

        Raises:
            ApiError: the server refused the request, or it did not end by itself.
            ClientLeft: nobody waits for it.
        """
        try:
            completion = await while_connected(request, self._stream.result())
        except KimiClientError as error:
            raise from_client_error(error, self._names) from None
        finally:
            self._stream.cancel()
        check_end(completion.finish_reason, completion.stop_reason)
        more = {"prompt_token_ids": list(completion.prompt_token_ids)} if completion.prompt_token_ids else {}
        statistics, choice = completion.statistics, await writer.whole(completion)
        body = envelope.wrap(writer.whole_object, [choice], usage=usage(statistics), statistics=statistics, **more)
        # Not JSONResponse: Python's encoder takes ten times as long, in which nobody else gets an answer.
        return Response(pydantic_core.to_json(body), headers=self._headers(), media_type="application/json")

    async def answer_streamed(
        self, request: Request, writer: ReplyWriter, envelope: Envelope, *, includes_usage: bool
    ) -> Response:
        """Events, once the first chunk is there, so that a request that is refused gets an HTTP status.

        Raises:
            ApiError: the server refused the request.
            ClientLeft: nobody waits for it.
        """

        async def first() -> Chunk | None:
            return await anext(self._chunks, None)

        try:
            chunk = await while_connected(request, first())
        except KimiClientError as error:
            raise from_client_error(error, self._names) from None
        except BaseException:
            self._stream.cancel()
            raise
        events = chunk_events(
            _put_back(chunk, self._chunks), writer, envelope, self._names, includes_usage=includes_usage
        )
        return EventStream(self._stream, events, self._headers())

    def _headers(self) -> dict[str, str]:
        return {REQUEST_ID_HEADER: self.request_id}


async def _put_back(first: Chunk | None, rest: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    if first is not None:
        yield first
    async for chunk in rest:
        yield chunk
