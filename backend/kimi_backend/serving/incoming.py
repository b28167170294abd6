"""The contents of an incoming request, read while its memory is the server's."""

from collections.abc import Iterable
from typing import Any

from kimi_backend.errors import InvalidRequestError
from kimi_backend.serving.bounded_json import parse_json
from kimi_backend.serving.request_limits import check_bytes, check_elements

MOST_PARAMETERS = 1024


def request_name(request: Any) -> str:
    """The client's name for the request, for the log."""
    try:
        return request.request_id() or "request"
    except UnicodeDecodeError:
        return "request"


def copied_tensors(inputs: Iterable[Any]) -> dict[str, Any]:
    """Input name -> a numpy array of its own.

    Args:
        inputs: the server's tensors, whose memory may be gone when its thread goes on.

    Raises:
        InvalidRequestError: one has more elements or bytes than its field may have.
    """
    tensors = {}
    for tensor in inputs:
        name, array = tensor.name(), tensor.as_numpy()
        check_elements(name, array.size)
        if array.dtype.hasobject:
            check_bytes(name, array.reshape(-1))
        tensors[name] = array.copy()
    return tensors


def parameters_text(request: Any) -> str:
    """The request's parameters as JSON; empty where there are none.

    Raises:
        InvalidRequestError: they are no text.
    """
    try:
        return str(request.parameters() or "")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"parameters: not valid UTF-8 ({error.reason} at byte {error.start})") from None


def read_parameters(text: str) -> dict[str, Any]:
    """The parameters out of `parameters_text`.

    Raises:
        InvalidRequestError: they are too many.
    """
    return dict(parse_json("parameters", text or "{}", MOST_PARAMETERS))
