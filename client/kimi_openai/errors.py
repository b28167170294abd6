"""Errors as OpenAI's clients know them: an HTTP status and an object that names the parameter.

They act on the status: 400 and 404 are the caller's mistake; 429 and 5xx are sent again unless a header says not to.
"""

import re
from collections.abc import Mapping
from typing import Any

from kimi_client import (
    InvalidRequest,
    KimiClientError,
    RequestCancelled,
    RequestTimedOut,
    ServerBusy,
    ServerUnreachable,
)

CLIENT_CLOSED_REQUEST = 499
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
QUEUE_IS_FULL = "requests are waiting"
"""A part of the message of a server that has no room; it has no code of its own."""
_IS_TOO_LONG = re.compile(r"\w+: \d+ (?:or more )?(?:tokens|characters) given, ")
_RETRY_LATER = {"Retry-After": "1"}
_NO_RETRY = {"X-Should-Retry": "false"}
"""The header of what would end the same way again, though clients repeat a request that gets its status."""
_FIELD = re.compile(r"[a-z_]+(?:\[\d+\]|\.[a-z_]+)*")


class ApiError(Exception):
    """A request that ends with an error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            status: HTTP status.
            param: the request's field that is wrong.
        """
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object that OpenAI's clients read."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad_field(param: str, problem: str) -> ApiError:
    """A 400 whose message begins with the field."""
    return ApiError(400, f"{param}: {problem}", param=param)


def from_client_error(error: KimiClientError, names: Mapping[str, str]) -> ApiError:
    """Translate what the server or the client library said into this API's terms.

    Args:
        names: the server's name of a field -> what this request calls it.
    """
    message = str(error)
    if isinstance(error, InvalidRequest):
        return _from_invalid_request(message, names)
    if isinstance(error, ServerBusy):
        return ApiError(429 if QUEUE_IS_FULL in message else 503, message, headers=_RETRY_LATER)
    if isinstance(error, ServerUnreachable):
        return ApiError(503, "the model server does not answer; try again later", headers=_RETRY_LATER)
    if isinstance(error, RequestTimedOut):
        return ApiError(504, message, code="timeout", headers=_NO_RETRY)
    if isinstance(error, RequestCancelled):
        return ApiError(503, message, code="cancelled", headers=_RETRY_LATER)
    return ApiError(500, message)


def deadline_passed(message: str) -> ApiError:
    """The request's own `timeout_s` is over: its caller's limit, and so no failure of the server's."""
    return ApiError(408, message, param="timeout_s", code="timeout", headers=_NO_RETRY)


def _from_invalid_request(message: str, names: Mapping[str, str]) -> ApiError:
    code = "context_length_exceeded" if _IS_TOO_LONG.match(message) else None
    found = _FIELD.match(message)
    if found is None:
        return ApiError(400, message, code=code)
    field = re.sub(r"^[a-z_]+", lambda root: names.get(root[0], root[0]), found[0])
    return ApiError(400, field + message[found.end() :], param=field, code=code)
