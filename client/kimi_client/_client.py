"""The blocking client."""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import grpc

from kimi_client._errors import InvalidRequest, KimiClientError, RequestCancelled, RequestTimedOut
from kimi_client._fields import RequestFields
from kimi_client._http import HttpTransport
from kimi_client._retries import may_retry, retry_pauses
from kimi_client._tensors import build_inputs
from kimi_client._transport import (
    Call,
    GrpcTransport,
    Metadata,
    Transport,
    build_request,
    deadline,
    from_rpc_error,
    parse_response,
)
from kimi_client._types import Chunk, Completion, join_chunks

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Stream:
    """One running request: iterate over its chunks; leave the `with` block or call `cancel` to stop it early."""

    def __init__(self, request_id: str, send: Callable[[bool], Call], pauses: Iterable[float] = ()) -> None:
        """
        Args:
            send: sends the request, over a new connection if it is given True.
            pauses: seconds before each time that it is sent again if it is refused.
        """
        self.request_id = request_id
        self.chunks: list[Chunk] = []
        self._send = send
        self._pauses = iter(pauses)
        self._call = send(False)
        self._is_open = True

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they arrive.

        Raises:
            KimiClientError: one of its subclasses; the request has ended then.
        """
        while self._is_open:
            try:
                response = next(self._call)
                chunk, is_last = parse_response(response)
            except StopIteration:
                self._is_open = False
                return
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
                if self._sends_again(error):
                    continue
                self._is_open = False
                raise error from None
            except KimiClientError as error:
                if self._sends_again(error):
                    continue
                self._is_open = False
                _read_to_end(self._call)
                raise
            self.chunks.append(chunk)
            self._is_open = not is_last
            yield chunk
            if is_last:
                _read_to_end(self._call)

    def _sends_again(self, error: KimiClientError) -> bool:
        pause_s = next(self._pauses, None) if may_retry(error) and not self.chunks else None
        if pause_s is None:
            return False
        _read_to_end(self._call)
        time.sleep(pause_s)
        self._call = self._send(True)
        return True

    def result(self) -> Completion:
        """Wait for the end and join all chunks. Raises as iterating does."""
        for _ in self:
            pass
        if not self.chunks or self.chunks[-1].finish_reason is None:
            raise RequestCancelled("the stream was cancelled before the request ended")
        return join_chunks(self.chunks)

    def cancel(self) -> None:
        """Stop the request on the server; does nothing when it has ended."""
        if self._is_open:
            self._is_open = False
            self._call.cancel()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def _read_to_end(call: Call) -> None:
    """Take what follows a request's last message, which is nothing. Triton Server 24.10 keeps some of each stream that
    was given up before its end: 7 KB, and more of a long request."""
    with contextlib.suppress(StopIteration, grpc.RpcError, KimiClientError):
        while True:
            next(call)


TRANSPORTS: dict[str, tuple[Callable[[str], Transport], str]] = {
    "grpc": (GrpcTransport, "localhost:8001"),
    "http": (HttpTransport, "localhost:8000"),
}
"""Protocol -> its transport and where a server listens."""


class KimiClient:
    """Talks to a server's `spec_ensemble`. Threads may share one: every request has its own stream.

    Over HTTP it is `spec_ensemble_unary`, which answers once: a stream there has one chunk, and a request that is
    cancelled ends on the server when its time is over.

    Example:
        >>> client = KimiClient("localhost:8001")
        >>> client.generate(text_input="def add(a, b):", max_tokens=32).text
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        protocol: Literal["grpc", "http"] = "grpc",
        timeout_s: float | None = None,
        max_retries: int = 0,
        transport: Transport | None = None,
    ) -> None:
        """
        Args:
            url: host:port of the server's endpoint of that protocol; by default localhost with 8001, or 8000 for HTTP.
            timeout_s: longest that a request may take, unless it says otherwise.
            max_retries: how often a request that was refused (ServerBusy, ServerUnreachable) is sent again, each time
                over a new connection and after a longer pause, up to two seconds.
            transport: another connection than one to `url`.

        Raises:
            InvalidRequest: the url has a scheme, or the protocol is none of the two.
        """
        if protocol not in TRANSPORTS:
            raise InvalidRequest(f"protocol: {protocol!r} given, one of {', '.join(TRANSPORTS)} is allowed")
        kind, default_url = TRANSPORTS[protocol]
        self.url = url or default_url
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self._transport = kind(self.url) if transport is None else transport

    def is_ready(self) -> bool:
        """Tell whether the server and the model answer. False when nothing is there."""
        return self._transport.is_ready()

    def stream(
        self, *, timeout_s: float | None = None, metadata: Metadata = (), **fields: "Unpack[RequestFields]"
    ) -> Stream:
        """Start a request and return its stream.

        Args:
            timeout_s: seconds until the request is cancelled.
            metadata: headers of the call, such as `traceparent`.
            fields: exactly one of text_input, messages, input_ids; and any other of `RequestFields`.

        Raises:
            InvalidRequest: a field is unknown or has a value that its type cannot hold.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        request_id = uuid.uuid4().hex
        request = build_request(request_id, build_inputs({"stream": True, "timeout_s": limit, **fields}))

        def send(again: bool) -> Call:
            if again:
                self._transport.reconnect()
            return self._transport.stream(request, deadline(limit), metadata)

        return Stream(request_id, send, retry_pauses(self.max_retries))

    def generate(self, *, timeout_s: float | None = None, **fields: "Unpack[RequestFields]") -> Completion:
        """Run a request to its end. Arguments and errors as for `stream` and its iteration.

        Raises:
            RequestTimedOut: it was cancelled because its time was over.
        """
        completion = self.stream(timeout_s=timeout_s, **fields).result()
        limit = self.timeout_s if timeout_s is None else timeout_s
        return check_time(completion, limit)

    def close(self) -> None:
        """Give the connection up; running streams end with an error."""
        self._transport.close()

    def __enter__(self) -> "KimiClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_time(completion: Completion, limit_s: float | None) -> Completion:
    """The completion itself, unless its deadline cut it off."""
    if completion.finish_reason == "cancelled" and limit_s is not None:
        raise RequestTimedOut(f"cancelled after {limit_s:g} s with {completion.num_output_tokens} tokens")
    return completion
