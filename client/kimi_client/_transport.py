"""One request, one gRPC stream, on tritonclient's own protobuf stubs.

tritonclient's `start_stream` keeps a thread that waits for more requests until the stream is stopped, so a stream that
its user forgets would keep the program from ending. A stream that is given its only request ends by itself.
"""

from typing import Any, Protocol

import grpc
import grpc.aio
import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from kimi_client._errors import InvalidRequest, KimiClientError, from_message, from_status
from kimi_client._tensors import MODEL_NAME, InputTensor, is_final, parse_chunk
from kimi_client._types import Chunk

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", 2**31 - 1),
    ("grpc.max_receive_message_length", 2**31 - 1),
    # gRPC's own limit is two minutes: so long after a server's return would a client that lives on not find it.
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Channels to one address share a connection otherwise, and `reconnect` would make none.
    ("grpc.use_local_subchannel_pool", 1),
]
# The server ends a request at its deadline; the stream's own one covers a server that never answers.
DEADLINE_GRACE_S = 5.0
LONGEST_DEADLINE_S = 366 * 24 * 3600.0
_READY_REQUEST = service_pb2.ModelReadyRequest(name=MODEL_NAME)

READY_TIMEOUT_S = 5.0

Metadata = tuple[tuple[str, str], ...]
"""Headers of a gRPC call: names in small letters, values."""


class Call(Protocol):
    """A running stream: `ModelStreamInferResponse` messages in order, StopIteration at the end."""

    def __next__(self) -> Any: ...

    def cancel(self) -> Any: ...


class Transport(Protocol):
    """The connection under a `KimiClient`: gRPC, or in a test whatever answers without a server."""

    def is_ready(self) -> bool: ...

    def stream(self, request: Any, timeout_s: float | None, metadata: Metadata = ()) -> Call:
        """Send a `ModelInferRequest`; the call ends after `timeout_s` with a grpc.RpcError."""
        ...

    def reconnect(self) -> None:
        """Later streams go over a new connection; those that run keep theirs."""
        ...

    def close(self) -> None: ...


class AsyncCall(Protocol):
    """A running stream: messages in order, grpc.aio.EOF at the end."""

    async def read(self) -> Any: ...

    def cancel(self) -> Any: ...


class AsyncTransport(Protocol):
    """The connection under an `AsyncKimiClient`."""

    async def is_ready(self) -> bool: ...

    def stream(self, request: Any, timeout_s: float | None, metadata: Metadata = ()) -> AsyncCall: ...

    def reconnect(self) -> None: ...

    async def close(self) -> None: ...


class GrpcTransport:
    """gRPC, blocking."""

    def __init__(self, url: str) -> None:
        self._url = checked_url(url)
        self.reconnect()

    def reconnect(self) -> None:
        self._channel = grpc.insecure_channel(self._url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def is_ready(self) -> bool:
        try:
            return bool(self._stub.ModelReady(_READY_REQUEST, timeout=READY_TIMEOUT_S).ready)
        except grpc.RpcError:
            return False

    def stream(self, request: Any, timeout_s: float | None, metadata: Metadata = ()) -> Call:
        call: Call = self._stub.ModelStreamInfer(iter([request]), timeout=timeout_s, metadata=metadata)
        return call

    def close(self) -> None:
        self._channel.close()


class GrpcAsyncTransport:
    """gRPC on asyncio."""

    def __init__(self, url: str) -> None:
        self._url = checked_url(url)
        self.reconnect()

    def reconnect(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def is_ready(self) -> bool:
        try:
            return bool((await self._stub.ModelReady(_READY_REQUEST, timeout=READY_TIMEOUT_S)).ready)
        except grpc.RpcError:
            return False

    def stream(self, request: Any, timeout_s: float | None, metadata: Metadata = ()) -> AsyncCall:
        call: AsyncCall = self._stub.ModelStreamInfer(iter([request]), timeout=timeout_s, metadata=metadata)
        return call

    async def close(self) -> None:
        await self._channel.close()


def checked_url(url: str) -> str:
    """
    Raises:
        InvalidRequest: it is not of the form that gRPC takes.
    """
    if "://" in url:
        raise InvalidRequest(f"url: {url!r} given, host:port of the server's gRPC endpoint is allowed")
    return url


def build_request(request_id: str, inputs: list[InputTensor]) -> Any:
    """The protobuf message of one request."""
    request = service_pb2.ModelInferRequest(model_name=MODEL_NAME, id=request_id)
    for tensor in inputs:
        entry = request.inputs.add()
        entry.name, entry.datatype = tensor.name, tensor.datatype
        entry.shape.extend(tensor.array.shape)
        request.raw_input_contents.append(_content(tensor))
    return request


def _content(tensor: InputTensor) -> bytes:
    if tensor.datatype != "BYTES":
        return np.ascontiguousarray(tensor.array).tobytes()
    serialized = serialize_byte_tensor(tensor.array)
    return serialized.item() if serialized.size else b""


def parse_response(response: Any) -> tuple[Chunk, bool]:
    """A stream's message as a chunk, and whether it is the last.

    Raises:
        KimiClientError: the message carries an error, which ends the request.
    """
    if response.error_message:
        raise from_message(response.error_message)
    result = grpcclient.InferResult(response.infer_response)
    return parse_chunk(result), is_final(result)


def from_rpc_error(error: Any) -> KimiClientError:
    """The error class for a grpc.RpcError."""
    return from_status(error.code().name, error.details() or "")


def deadline(timeout_s: float | None) -> float | None:
    """Seconds that a call may take for a request of so many: gRPC takes centuries for a deadline that has passed."""
    return None if timeout_s is None else min(timeout_s + DEADLINE_GRACE_S, LONGEST_DEADLINE_S)
