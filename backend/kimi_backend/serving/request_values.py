"""Collects a request's fields from its three places (tensors, parameters, `sampling_parameters`) and checks types."""

import difflib
import json
import sys
from collections.abc import Mapping
from typing import Any

from kimi_backend.errors import InvalidRequestError
from kimi_backend.serving.bounded_json import parse_json
from kimi_backend.serving.request_fields import (
    ALIASES,
    ELSEWHERE,
    INPUT_FIELDS,
    REMOVED_FIELDS,
    UNSUPPORTED_FIELDS,
    Kind,
    is_servers_own,
)
from kimi_backend.serving.request_limits import check_bytes, check_elements, check_items
from kimi_backend.text.unicode_text import require_valid_unicode

FIELDS = {field.name: field for field in INPUT_FIELDS}

MOST_DIGITS = 20
"""The most digits of a token id; far more than any has, and few enough to be read."""

_EXPECTED = {
    Kind.TEXT: "a string",
    Kind.TEXTS: "a string or a list of strings",
    Kind.JSON: "JSON",
    Kind.INT: "an integer",
    Kind.INTS: "a list of integers",
    Kind.UINT64: "an integer from 0 to 2^64 - 1",
    Kind.FLOAT: "a number",
    Kind.BOOL: "true or false",
}


def tensor_value(name: str, array: Any) -> Any:
    """A field's Python value out of its input tensor; lists stay lists, everything else must hold one element.

    Args:
        array: numpy array of any shape; strings as bytes objects.
    """
    kind, flat = FIELDS[name].kind, array.reshape(-1)
    check_elements(name, len(flat))
    if kind is Kind.FLOAT:
        # What the client wrote, 0.01, and not what float32 made of it, 0.009999999776482582.
        return float(str(flat[0]))
    values = flat.tolist()
    if kind in (Kind.TEXT, Kind.TEXTS, Kind.JSON):
        check_bytes(name, values)
        values = [_decode(name, value) for value in values]
    return values if kind.is_list else values[0]


def _decode(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name}: not valid UTF-8 ({error.reason} at byte {error.start})") from None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Tell whether it is a number and a float can hold it; NaN is none."""
    return (isinstance(value, float) and value == value) or (_is_int(value) and abs(value) <= sys.float_info.max)


def is_token_id(key: str) -> bool:
    """Tell whether a JSON object's key is a token id, written in the one way that two keys cannot share."""
    return len(key) <= MOST_DIGITS and key.isascii() and key.isdecimal() and key == str(int(key))


def _fits(kind: Kind, value: Any) -> bool:
    if kind is Kind.TEXT:
        return isinstance(value, str)
    if kind is Kind.TEXTS:
        return isinstance(value, list) and all(isinstance(v, str) for v in value)
    if kind is Kind.INTS:
        return isinstance(value, list) and all(_is_int(v) for v in value)
    if kind is Kind.INT:
        return _is_int(value)
    if kind is Kind.UINT64:
        return _is_int(value) and 0 <= value < 2**64
    if kind is Kind.FLOAT:
        return is_number(value)
    if kind is Kind.BOOL:
        return isinstance(value, bool)
    return True


def _typed(name: str, value: Any) -> Any:
    kind = FIELDS[name].kind
    if kind is Kind.JSON:
        return _json_value(name, value)
    if kind is Kind.TEXTS and isinstance(value, str):
        value = [value]
    if kind.is_list and isinstance(value, list):
        check_items(name, len(value))
    if not _fits(kind, value):
        raise InvalidRequestError(f"{name}: {shown(value)} given, {_EXPECTED[kind]} is allowed")
    if kind is Kind.TEXT:
        check_bytes(name, [value])
        require_valid_unicode(value, name)
    elif kind is Kind.TEXTS:
        check_bytes(name, value)
        for index, text in enumerate(value):
            require_valid_unicode(text, f"{name}[{index}]")
    return float(value) if kind is Kind.FLOAT else value


def shown(value: Any) -> str:
    """The value as an error quotes it."""
    return _shortened(repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


_PLAIN_WORDS = {"tool_choice": ("auto", "none", "required")}
"""Values of a JSON field that need no quotes."""


def _json_value(name: str, value: Any) -> Any:
    if isinstance(value, str) and value in _PLAIN_WORDS.get(name, ()):
        return value
    if isinstance(value, str):
        check_bytes(name, [value])
        value = parse_json(name, value)
    elif isinstance(value, (list, dict)):
        check_bytes(name, [json.dumps(value)])
    if isinstance(value, (list, dict)):
        check_items(name, len(value))
    return value


def _meant(name: str) -> str:
    """The field that a client may have had in mind, as words; empty when none is near."""
    near = difflib.get_close_matches(name, FIELDS, 1, cutoff=0.8)
    meant = ELSEWHERE.get(name) or (near[0] if near else None)
    return "" if meant is None else f" (is {meant} meant?)"


class _Collector:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._given_as: dict[str, str] = {}

    def add(self, name: str, value: Any, place: str) -> None:
        if name in UNSUPPORTED_FIELDS:
            self._refuse_unless_default(name, value)
            return
        if name in REMOVED_FIELDS:
            raise InvalidRequestError(f"{name}: this {place} was removed; {REMOVED_FIELDS[name]}")
        if name not in FIELDS:
            name = _shortened(name)
            raise InvalidRequestError(f"{name}: unknown {place}{_meant(name)}; docs/protocol.md lists what is known")
        target = ALIASES.get(name, name)
        if target in self._given_as:
            raise InvalidRequestError(f"{target}: given twice, as {self._given_as[target]} and as {place} {name}")
        self._given_as[target] = f"{place} {name}"
        self.values[target] = _typed(name, value)

    @staticmethod
    def _refuse_unless_default(name: str, value: Any) -> None:
        allowed = UNSUPPORTED_FIELDS[name]
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            only = "it is not supported" if allowed is None else f"only {json.dumps(allowed)} is supported"
            raise InvalidRequestError(f"{name}: {shown(value)} given, {only}")


def collect_values(tensors: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Every field that the request gives, by its one name, in its Python type.

    Args:
        tensors: input name -> numpy array.
        parameters: the request's parameters.

    Raises:
        InvalidRequestError: unknown, unsupported, doubled, of the wrong type, or not parsable; names the field.
    """
    collector = _Collector()
    for name, array in tensors.items():
        collector.add(name, tensor_value(name, array), "input")
    for name, value in parameters.items():
        if not is_servers_own(name):
            collector.add(name, value, "parameter")
    nested = collector.values.pop("sampling_parameters", None)
    if nested is not None:
        if not isinstance(nested, dict):
            raise InvalidRequestError(f"sampling_parameters: {shown(nested)} given, a JSON object is allowed")
        for name, value in nested.items():
            if name == "sampling_parameters":
                raise InvalidRequestError("sampling_parameters: may not hold itself")
            collector.add(name, value, "sampling_parameters entry")
    return collector.values
