"""The asyncio client: the same surface as `KimiClient`."""

import uuid
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import tritonclient.grpc.aio as grpcaio
from tritonclient.utils import InferenceServerException

from kimi_client._client import STATUS_HEADER
from kimi_client._errors import RequestCancelled, RequestTimedOut, from_server
from kimi_client._tensors import MODEL_NAME, build_inputs, is_final, parse_chunk
from kimi_client._types import Chunk, Completion, join_chunks


class AsyncStream:
    """One running request: `async for` over its chunks."""

    def __init__(self, request_id: str, responses: Any) -> None:
        self.request_id = request_id
        self.chunks: list[Chunk] = []
        self._responses = responses
        self._is_open = True

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks as they arrive. Raises as `Stream.__iter__` does."""
        while self._is_open:
            try:
                result, error = await self._responses.__anext__()
            except StopAsyncIteration:
                self._is_open = False
                return
            except InferenceServerException as failure:
                result, error = None, failure
            except grpcaio.grpc.RpcError as failure:
                result, error = None, _as_server_exception(failure)
            if error is not None:
                self._is_open = False
                raise from_server(error)
            chunk = parse_chunk(result)
            self.chunks.append(chunk)
            if is_final(result):
                self._is_open = False
            yield chunk

    async def result(self) -> Completion:
        """Wait for the end and join all chunks."""
        async for _ in self:
            pass
        if not self.chunks or self.chunks[-1].finish_reason is None:
            raise RequestCancelled("the stream was cancelled before the request ended")
        return join_chunks(self.chunks)

    def cancel(self) -> None:
        """Stop the request on the server; does nothing when it has ended."""
        if self._is_open:
            self._is_open = False
            self._responses.cancel()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def _as_server_exception(error: Any) -> InferenceServerException:
    return InferenceServerException(msg=error.details(), status=str(error.code()))


class AsyncKimiClient:
    """As `KimiClient`, for asyncio. Close it, or use `async with`."""

    def __init__(self, url: str = "localhost:8001", *, timeout_s: float | None = None) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._client = grpcaio.InferenceServerClient(url)

    async def is_ready(self) -> bool:
        """Whether the server and the model answer."""
        try:
            return bool(await self._client.is_server_ready() and await self._client.is_model_ready(MODEL_NAME))
        except InferenceServerException:
            return False

    def stream(self, *, timeout_s: float | None = None, **fields: Any) -> AsyncStream:
        """Start a request and return its stream. Arguments and errors as for `KimiClient.stream`."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        request_id = uuid.uuid4().hex
        inputs = build_inputs({"stream": True, "timeout_s": limit, **fields})

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": MODEL_NAME, "inputs": inputs, "request_id": request_id}

        responses = self._client.stream_infer(
            requests(), stream_timeout=None if limit is None else limit + 5, headers=STATUS_HEADER
        )
        return AsyncStream(request_id, responses)

    async def generate(self, *, timeout_s: float | None = None, **fields: Any) -> Completion:
        """Run a request to its end. Raises as `KimiClient.generate` does."""
        completion = await self.stream(timeout_s=timeout_s, **fields).result()
        limit = self.timeout_s if timeout_s is None else timeout_s
        if completion.finish_reason == "cancelled" and limit is not None:
            raise RequestTimedOut(f"cancelled after {limit:g} s with {completion.num_output_tokens} tokens")
        return completion

    async def close(self) -> None:
        await self._client.close()

    async def __aenter__(self) -> "AsyncKimiClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
