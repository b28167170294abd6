"""One request, one HTTP exchange with `spec_ensemble_unary`, tensors as binary data behind a JSON header."""

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

from tritonclient.grpc import service_pb2

from kimi_client._errors import KimiClientError, RequestTimedOut, ServerUnreachable
from kimi_client._transport import READY_TIMEOUT_S, Call, Metadata, checked_url

MODEL_NAME = "spec_ensemble_unary"
HEADER_LENGTH = "Inference-Header-Content-Length"
_PATH = f"/v2/models/{MODEL_NAME}"


class HttpTransport:
    """HTTP, blocking: a request's only message comes at its end."""

    def __init__(self, url: str) -> None:
        self._url = checked_url(url)

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self._url, timeout=READY_TIMEOUT_S)
        try:
            connection.request("GET", f"{_PATH}/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stream(self, request: Any, timeout_s: float | None, metadata: Metadata = ()) -> Call:
        return _HttpCall(http.client.HTTPConnection(self._url, timeout=timeout_s), request, metadata)

    def reconnect(self) -> None:
        """Do nothing: each request has a connection of its own."""

    def close(self) -> None:
        """Do nothing: each request has a connection of its own."""


class _HttpCall:
    def __init__(self, connection: http.client.HTTPConnection, request: Any, metadata: Metadata) -> None:
        self._connection = connection
        self._error: KimiClientError | None = None
        self._messages = self._receive()
        header, body = _encode(request)
        headers = {HEADER_LENGTH: str(len(header)), "Content-Type": "application/octet-stream"}
        headers |= dict(metadata)
        try:
            connection.request("POST", f"{_PATH}/infer", header + body, headers)
        except (OSError, http.client.HTTPException) as error:
            self._error = _from_os_error(error)
            connection.close()

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        return next(self._messages)

    def cancel(self) -> None:
        """Leave; the server ends the request by itself, at the latest when its `timeout_s` is over."""
        if self._connection.sock is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _receive(self) -> Iterator[Any]:
        try:
            reply = self._connection.getresponse()
            content = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise _from_os_error(error) from None
        finally:
            self._connection.close()
        if reply.status != http.HTTPStatus.OK:
            yield service_pb2.ModelStreamInferResponse(error_message=_error_text(reply.status, content))
        else:
            length = int(reply.headers.get(HEADER_LENGTH, len(content)))
            yield _decode(content[:length], content[length:])


def _encode(request: Any) -> tuple[bytes, bytes]:
    """(header, binary data) of a `ModelInferRequest`, without its field `stream`: this model answers once."""
    inputs, contents = [], []
    for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.name != "stream":
            size = {"binary_data_size": len(content)}
            inputs.append(
                {"name": tensor.name, "datatype": tensor.datatype, "shape": [*tensor.shape], "parameters": size}
            )
            contents.append(content)
    header = {"id": request.id, "inputs": inputs, "parameters": {"binary_data_output": True}}
    return json.dumps(header).encode(), b"".join(contents)


def _decode(header: bytes, data: bytes) -> Any:
    """A reply as the message that a stream would bring."""
    message = service_pb2.ModelStreamInferResponse()
    response, at = message.infer_response, 0
    for output in json.loads(header)["outputs"]:
        response.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        end = at + output["parameters"]["binary_data_size"]
        response.raw_output_contents.append(data[at:end])
        at = end
    response.parameters["triton_final_response"].bool_param = True
    return message


def _error_text(status: int, content: bytes) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {status}"


def _from_os_error(error: Exception) -> KimiClientError:
    if isinstance(error, TimeoutError):
        return RequestTimedOut("the server has not answered in time")
    said = str(error) or type(error).__name__
    return ServerUnreachable(f"{said} (is the server running, and is this its HTTP port?)")
