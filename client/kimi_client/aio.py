"""The asyncio client: the same surface as `KimiClient`."""

import uuid
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kimi_client._client import check_time
from kimi_client._errors import KimiClientError, RequestCancelled
from kimi_client._fields import RequestFields
from kimi_client._tensors import build_inputs
from kimi_client._transport import (
    AsyncCall,
    AsyncTransport,
    GrpcAsyncTransport,
    build_request,
    deadline,
    from_rpc_error,
    parse_response,
)
from kimi_client._types import Chunk, Completion, join_chunks

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncStream:
    """One running request: `async for` over its chunks."""

    def __init__(self, request_id: str, call: AsyncCall) -> None:
        self.request_id = request_id
        self.chunks: list[Chunk] = []
        self._call = call
        self._is_open = True

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks as they arrive. Raises as `Stream.__iter__` does."""
        while self._is_open:
            try:
                response = await self._call.read()
                if response is grpc.aio.EOF:
                    self._is_open = False
                    return
                chunk, is_last = parse_response(response)
            except grpc.RpcError as error:
                self._is_open = False
                raise from_rpc_error(error) from None
            except KimiClientError:
                self.cancel()
                raise
            self.chunks.append(chunk)
            self._is_open = not is_last
            yield chunk

    async def result(self) -> Completion:
        """Wait for the end and join all chunks. Raises as iterating does."""
        async for _ in self:
            pass
        if not self.chunks or self.chunks[-1].finish_reason is None:
            raise RequestCancelled("the stream was cancelled before the request ended")
        return join_chunks(self.chunks)

    def cancel(self) -> None:
        """Stop the request on the server; does nothing when it has ended."""
        if self._is_open:
            self._is_open = False
            self._call.cancel()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncKimiClient:
    """As `KimiClient`, for asyncio. Close it, or use `async with`."""

    def __init__(
        self, url: str = "localhost:8001", *, timeout_s: float | None = None, transport: AsyncTransport | None = None
    ) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._transport = GrpcAsyncTransport(url) if transport is None else transport

    async def is_ready(self) -> bool:
        """Whether the server and the model answer."""
        return await self._transport.is_ready()

    def stream(self, *, timeout_s: float | None = None, **fields: "Unpack[RequestFields]") -> AsyncStream:
        """Start a request and return its stream. Arguments and errors as for `KimiClient.stream`."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        request_id = uuid.uuid4().hex
        request = build_request(request_id, build_inputs({"stream": True, "timeout_s": limit, **fields}))
        return AsyncStream(request_id, self._transport.stream(request, deadline(limit)))

    async def generate(self, *, timeout_s: float | None = None, **fields: "Unpack[RequestFields]") -> Completion:
        """Run a request to its end. Raises as `KimiClient.generate` does."""
        completion = await self.stream(timeout_s=timeout_s, **fields).result()
        return check_time(completion, self.timeout_s if timeout_s is None else timeout_s)

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> "AsyncKimiClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
