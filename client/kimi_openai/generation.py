"""The running requests of one call, a request for each of its choices, and the two ways to answer with them."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response

from kimi_client import Completion, KimiClientError
from kimi_client.aio import AsyncKimiClient, AsyncStream
from kimi_openai.connection import while_connected
from kimi_openai.errors import ApiError, from_client_error
from kimi_openai.event_stream import ChoiceChunk, EventStream, UsageMode, check_end, chunk_events, whole_reply
from kimi_openai.merging import merged
from kimi_openai.replies import Envelope, ReplyWriter, usage
from kimi_openai.server_fields import ServerRequest

REQUEST_ID_HEADER = "X-Request-Id"

MakeWriter = Callable[[], ReplyWriter]


def spread(prompts: Sequence[ServerRequest], n: int) -> list[ServerRequest]:
    """n choices of each prompt. Choice i draws with the request's seed + i: what a request with that seed gets."""
    return [_choice(prompt, index) for prompt in prompts for index in range(n)]


def _choice(prompt: ServerRequest, index: int) -> ServerRequest:
    seed = prompt.fields.get("seed")
    if seed is None or index == 0:
        return prompt
    return dataclasses.replace(prompt, fields={**prompt.fields, "seed": (seed + index) % 2**64})


class Generation:
    """A client that leaves ends all of it on the server too."""

    def __init__(
        self,
        client: AsyncKimiClient,
        prompts: Sequence[ServerRequest],
        n: int,
        *,
        is_streamed: bool,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts the requests.

        Args:
            prompts: in the order of the choices, n of each.
            more: arguments of `AsyncKimiClient.stream` beside each prompt's own.

        Raises:
            ApiError: a value that the client library cannot send.
        """
        self._n = n
        self._asked = spread(prompts, n)
        self._streams: list[AsyncStream] = []
        for asked in self._asked:
            try:
                self._streams.append(client.stream(stream=is_streamed, **(more or {}), **asked.fields))
            except KimiClientError as error:
                self.cancel()
                raise _api_error(error, asked) from None

    @property
    def request_id(self) -> str:
        """The name of its first request in the server's log."""
        return self._streams[0].request_id

    @property
    def statistics(self) -> dict[str, Any]:
        """The server's statistics of its first request at its end; empty before."""
        chunks = self._streams[0].chunks
        return chunks[-1].statistics or {} if chunks else {}

    def cancel(self) -> None:
        """End what still runs."""
        for stream in self._streams:
            stream.cancel()

    async def answer_whole(self, request: Request, make_writer: MakeWriter, envelope: Envelope) -> Response:
        """One body.

        Raises:
            ApiError: the server refused a request, or one did not end by itself.
            ClientLeft: nobody waits for it.
        """
        try:
            completions = await while_connected(request, self._results())
        finally:
            self.cancel()
        writers = [make_writer() for _ in completions]
        choices = [await w.whole(c) | {"index": i} for i, (w, c) in enumerate(zip(writers, completions, strict=True))]
        details = [_details(c) | w.beside(c) for w, c in zip(writers, completions, strict=True)]
        if len(choices) > 1:
            choices, details = [choice | more for choice, more in zip(choices, details, strict=True)], [{}]
        total = usage([completion.statistics for completion in completions], self._n)
        body = envelope.wrap(writers[0].whole_object, choices, usage=total, **details[0])
        # Not JSONResponse: Python's encoder takes ten times as long, in which nobody else gets an answer.
        return Response(pydantic_core.to_json(body), headers=self._headers(), media_type="application/json")

    async def answer_streamed(
        self, request: Request, make_writer: MakeWriter, envelope: Envelope, usage_mode: UsageMode
    ) -> Response:
        """Events, once the first chunk is there, so that a request that is refused gets an HTTP status.

        Raises:
            ApiError: the server refused a request.
            ClientLeft: nobody waits for it.
        """
        chunks = merged([self._chunks(index) for index in range(len(self._streams))])

        async def first() -> ChoiceChunk | None:
            return await anext(chunks, None)

        try:
            chunk = await while_connected(request, first())
        except BaseException:
            self.cancel()
            raise
        writers = [make_writer() for _ in self._streams]
        events = chunk_events(_put_back(chunk, chunks), writers, envelope, usage_mode, choices_a_prompt=self._n)
        return EventStream(self, events, self._headers())

    async def _results(self) -> list[Completion]:
        """Every completion, or the first failure."""
        tasks = [asyncio.create_task(self._result(index)) for index in range(len(self._streams))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _result(self, index: int) -> Completion:
        try:
            completion = await self._streams[index].result()
            check_end(completion.finish_reason, completion.stop_reason)
        except (KimiClientError, ApiError) as error:
            raise _api_error(error, self._asked[index]) from None
        return completion

    async def _chunks(self, index: int) -> AsyncIterator[ChoiceChunk]:
        try:
            async for chunk in whole_reply(aiter(self._streams[index])):
                yield index, chunk
        except (KimiClientError, ApiError) as error:
            raise _api_error(error, self._asked[index]) from None

    def _headers(self) -> dict[str, str]:
        return {REQUEST_ID_HEADER: self.request_id}


def _details(completion: Completion) -> dict[str, Any]:
    """The details that the server tells of one completion; beside the choices where there is only one, else in each."""
    ids = {"prompt_token_ids": list(completion.prompt_token_ids)} if completion.prompt_token_ids else {}
    return {"statistics": completion.statistics, **ids}


def _api_error(error: KimiClientError | ApiError, asked: ServerRequest) -> ApiError:
    """The error in this API's terms; of several prompts it says which has failed."""
    said = error if isinstance(error, ApiError) else from_client_error(error, asked.names)
    if asked.prompt_name is None or said.param is not None:
        return said
    return ApiError(
        said.status, f"{asked.prompt_name}: {said}", param=asked.prompt_name, code=said.code, headers=said.headers
    )


async def _put_back(first: ChoiceChunk | None, rest: AsyncIterator[ChoiceChunk]) -> AsyncIterator[ChoiceChunk]:
    if first is not None:
        yield first
    async for chunk in rest:
        yield chunk
