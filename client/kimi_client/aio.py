"""The asyncio client: the same surface as `KimiClient`."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kimi_client._client import check_time
from kimi_client._errors import KimiClientError, RequestCancelled
from kimi_client._fields import RequestFields
from kimi_client._retries import may_retry, retry_pauses
from kimi_client._tensors import build_inputs
from kimi_client._transport import (
    AsyncCall,
    AsyncTransport,
    GrpcAsyncTransport,
    Metadata,
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

    def __init__(self, request_id: str, send: Callable[[bool], AsyncCall], pauses: Iterable[float] = ()) -> None:
        self.request_id = request_id
        self.chunks: list[Chunk] = []
        self._send = send
        self._pauses = iter(pauses)
        self._call = send(False)
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
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
                if await self._sends_again(error):
                    continue
                self._is_open = False
                raise error from None
            except KimiClientError as error:
                if await self._sends_again(error):
                    continue
                self._is_open = False
                await _read_to_end(self._call)
                raise
            self.chunks.append(chunk)
            self._is_open = not is_last
            yield chunk
            if is_last:
                await _read_to_end(self._call)

    async def _sends_again(self, error: KimiClientError) -> bool:
        pause_s = next(self._pauses, None) if may_retry(error) and not self.chunks else None
        if pause_s is None:
            return False
        await _read_to_end(self._call)
        await asyncio.sleep(pause_s)
        self._call = self._send(True)
        return True

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


async def _read_to_end(call: AsyncCall) -> None:
    """Take what follows a request's last message, as the blocking client does."""
    with contextlib.suppress(grpc.RpcError):
        while await call.read() is not grpc.aio.EOF:
            pass


class AsyncKimiClient:
    """A `KimiClient` for asyncio. Close it, or use `async with`."""

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        timeout_s: float | None = None,
        max_retries: int = 0,
        transport: AsyncTransport | None = None,
    ) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self._transport = GrpcAsyncTransport(url) if transport is None else transport

    async def is_ready(self) -> bool:
        """Tell whether the server and the model answer."""
        return await self._transport.is_ready()

    def stream(
        self, *, timeout_s: float | None = None, metadata: Metadata = (), **fields: "Unpack[RequestFields]"
    ) -> AsyncStream:
        """Start a request and return its stream. Arguments and errors as for `KimiClient.stream`."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        request_id = uuid.uuid4().hex
        request = build_request(request_id, build_inputs({"stream": True, "timeout_s": limit, **fields}))

        def send(again: bool) -> AsyncCall:
            if again:
                self._transport.reconnect()
            return self._transport.stream(request, deadline(limit), metadata)

        return AsyncStream(request_id, send, retry_pauses(self.max_retries))

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
