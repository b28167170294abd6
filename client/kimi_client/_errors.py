"""Errors, one class for each thing that a caller can do about it.

KimiClientError
├── InvalidRequest       fix the request; the message names the field, the value and what is allowed
├── ServerBusy           try again later: the queue is full, or a model is loading
├── RequestCancelled     the request ended because someone cancelled it
├── RequestTimedOut      it took longer than the caller allowed
├── ServerUnreachable    nothing answers at that address
└── ServerFailed         the server's fault; its log has the details
"""


class KimiClientError(Exception):
    """Base of all errors that this package raises on purpose."""


class InvalidRequest(KimiClientError):
    """The server refused the request as it is."""


class ServerBusy(KimiClientError):
    """No room or not ready; the same request may succeed later."""


class RequestCancelled(KimiClientError):
    """The request was cancelled, by this client or by the server's shutdown."""


class RequestTimedOut(KimiClientError):
    """The deadline that the caller set has passed."""


class ServerUnreachable(KimiClientError):
    """No connection to the server."""


class ServerFailed(KimiClientError):
    """The server answered with an internal error."""


_BY_STATUS = {
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": InvalidRequest,
    "UNIMPLEMENTED": InvalidRequest,
    "ALREADY_EXISTS": InvalidRequest,
    "UNAVAILABLE": ServerBusy,
    "CANCELLED": RequestCancelled,
    "DEADLINE_EXCEEDED": RequestTimedOut,
}

_BY_CODE = {
    "INVALID_ARG": InvalidRequest,
    "UNAVAILABLE": ServerBusy,
    "CANCELLED": RequestCancelled,
    "INTERNAL": ServerFailed,
}

_NOT_READY_SIGNS = ("unknown model", "not ready", "unavailable")

_CONNECTION_SIGNS = ("failed to connect", "Connection refused", "Socket closed", "DNS resolution failed", "GOAWAY")


def from_status(status: str, message: str) -> KimiClientError:
    """The error class for a gRPC status code's name."""
    if status == "UNAVAILABLE" and any(sign in message for sign in _CONNECTION_SIGNS):
        return ServerUnreachable(f"{message} (is the server running, and is this its gRPC port?)")
    return _BY_STATUS.get(status, ServerFailed)(message)


def from_message(text: str) -> KimiClientError:
    """The error class for a message on a stream: the model's own begin with their code, the server's do not."""
    code, separator, message = text.partition(": ")
    if separator and code in _BY_CODE:
        return _BY_CODE[code](message)
    if any(sign in text for sign in _NOT_READY_SIGNS):
        return ServerBusy(text)
    return ServerFailed(text)
