"""A request's body -> a checked model of its fields."""

import difflib
import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import pydantic
import pydantic_core

from kimi_openai.errors import ApiError, bad_field
from kimi_openai.request_fields import IGNORED, INSTEAD, NO_VALUE, REFUSED

logger = logging.getLogger("kimi_openai")
LONGEST_SHOWN = 80
RequestT = TypeVar("RequestT", bound=pydantic.BaseModel)


def parse_body(body: bytes, kind: type[RequestT], *, refuses_unknown: bool = True) -> RequestT:
    """
    Args:
        body: JSON, UTF-8.
        kind: which endpoint's fields.
        refuses_unknown: fields that nobody knows are refused; else they are told in the log and left out. Fields that
            are known and not served are refused either way.

    Raises:
        ApiError: 400; not JSON, or a field that is missing, unknown, not served or of a wrong type, by its name.
    """
    try:
        values = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"the body is {shown(values)}, a JSON object is allowed")
    known = kind.model_fields
    for name, value in values.items():
        if name not in known and name not in IGNORED and value is not None:
            if name in REFUSED or refuses_unknown:
                _refuse(name, value, known)
            logger.warning("unknown field %s is left out", shown_name(name))
    try:
        return kind.model_validate({name: value for name, value in values.items() if name in known})
    except pydantic.ValidationError as error:
        raise _from_validation(error) from None


def _refuse(name: str, value: Any, known: Iterable[str]) -> None:
    if name not in REFUSED:
        name = shown_name(name)
        near = difflib.get_close_matches(name, known, 1, cutoff=0.8)
        meant = f" (is {near[0]} meant?)" if near else ""
        raise bad_field(name, f"unknown field{meant}; docs/openai.md lists what is known")
    allowed = REFUSED[name]
    if value == allowed and isinstance(value, bool) == isinstance(allowed, bool):
        return
    only = "it is not supported" if allowed is NO_VALUE else f"only {json.dumps(allowed)} is supported"
    hint = f"; {INSTEAD[name]}" if name in INSTEAD else ""
    raise bad_field(name, f"{shown(value)} given, {only}{hint}")


def _from_validation(error: pydantic.ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    name, *deeper = first["loc"]
    field = str(name) + "".join(f"[{part}]" if isinstance(part, int) else f".{shown_name(part)}" for part in deeper)
    if first["type"] == "missing":
        return bad_field(field, "missing, it is needed")
    return bad_field(field, f"{shown(first['input'])} given, {first['msg'][0].lower()}{first['msg'][1:]}")


def shown(value: Any) -> str:
    """The value as an error quotes it; of a long one only the beginning is looked at."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > LONGEST_SHOWN:
            return text[: LONGEST_SHOWN - 3] + "..."
    return text


def _pieces(value: Any) -> Iterator[str]:
    """The text of `repr`, in pieces; what comes behind LONGEST_SHOWN characters may be wrong."""
    if isinstance(value, (list, dict)):
        begin, end = "[]" if isinstance(value, list) else "{}"
        yield begin
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _pieces(item)
            if isinstance(value, dict):
                yield ": "
                yield from _pieces(value[item])
        yield end
    else:
        yield repr(value[: LONGEST_SHOWN + 1] if isinstance(value, str) else value)


def shown_name(name: str) -> str:
    """A name that a client chose, cut to a length that a message can carry."""
    return name if len(name) <= LONGEST_SHOWN else name[: LONGEST_SHOWN - 3] + "..."
