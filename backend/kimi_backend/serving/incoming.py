"""An incoming request says things beside its tensors."""

import json
from typing import Any

from kimi_backend.errors import InvalidRequestError


def request_name(request: Any) -> str:
    """The client's name for the request, for the log."""
    try:
        return request.request_id() or "request"
    except UnicodeDecodeError:
        return "request"


def parameters_text(request: Any) -> str:
    """The request's parameters as JSON; empty where there are none.

    Raises:
        InvalidRequestError: they are no text.
    """
    try:
        return str(request.parameters() or "")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"parameters: not valid UTF-8 ({error.reason} at byte {error.start})") from None


def read_parameters(request: Any) -> dict[str, Any]:
    """The request's parameters; raises as `parameters_text`."""
    return dict(json.loads(parameters_text(request) or "{}"))
