"""The JSON schemas that can be enforced: what is not known here is refused by its place, never ignored.

xgrammar takes any schema and passes over what it does not know, so that a text would not fit; this list is of what it
was seen to enforce.
"""

import itertools
import json
import math
import sys
from collections.abc import Callable
from typing import Any

from kimi_backend.errors import InvalidRequestError
from kimi_backend.grammar.exclusive import are_exclusive, as_any_of

MOST_LEVELS = 64
MOST_PAIRS = 1000
"""Pairs of parts of a `oneOf` that are compared, at most."""
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "discriminator"}
)
"""They say nothing of what fits."""
_AT_ROOT = frozenset({"$schema", "$id", "$defs", "definitions"})
_REF_ROOTS = ("$defs", "definitions")
FORMATS = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"),
        *("uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
KEYWORDS: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": (*_RANGE, "multipleOf"),
    "number": _RANGE,
    "boolean": (),
    "null": (),
}
"""Type -> keywords that may stand beside it."""
_COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
_PAIRS = (("minProperties", "maxProperties"), ("minItems", "maxItems"), ("minLength", "maxLength"), _RANGE[:2])
_COMBINED = ("anyOf", "oneOf", "allOf")


def check_schema(schema: Any, field: str) -> None:
    """Pass silently if every keyword can be enforced.

    Args:
        field: what the schema is called in errors.

    Raises:
        InvalidRequestError: names the place in the schema, what is there and what is allowed.
    """
    _Checker(schema, field).check()


class _Checker:
    def __init__(self, root: Any, field: str) -> None:
        self._root, self._field = root, field

    def check(self) -> None:
        self._schema(self._root, self._field, 0)
        if isinstance(self._root, dict):
            for name in _REF_ROOTS:
                definitions = self._root.get(name, {})
                self._need(isinstance(definitions, dict), f"{self._field}.{name}", definitions, "an object of schemas")
                for key, value in definitions.items():
                    self._schema(value, f"{self._field}.{name}.{key}", 1)

    def _schema(self, schema: Any, place: str, level: int) -> None:
        if level > MOST_LEVELS:
            raise InvalidRequestError(f"{_short(place)}: more than {MOST_LEVELS} levels deep")
        if schema is True:
            return
        self._need(isinstance(schema, dict), place, schema, "a schema that something fits is allowed")
        known = ANNOTATIONS | (_AT_ROOT if level == 0 else frozenset())
        keywords = [name for name in schema if name not in known]
        for name in ("$ref", "enum", "const", *_COMBINED):
            if name in keywords:
                self._alone(schema, keywords, name, place)
                self._special(schema, name, place, level)
                return
        self._typed(schema, keywords, place, level)

    def _alone(self, schema: dict[str, Any], keywords: list[str], name: str, place: str) -> None:
        beside = {"type"} if name in ("enum", "const") else set()
        for other in keywords:
            if other != name and other not in beside:
                raise InvalidRequestError(f"{_short(place)}.{_short(other)}: cannot be enforced beside {name}")
        if "type" in keywords:
            values = schema["enum"] if name == "enum" else [schema[name]]
            types = self._types(schema, place)
            for value in values if isinstance(values, list) else []:
                if not any(_is_of(value, kind) for kind in types):
                    raise InvalidRequestError(f"{_short(place)}.{name}: {_shown(value)} is not of the type beside it")

    def _special(self, schema: dict[str, Any], name: str, place: str, level: int) -> None:
        value, there = schema[name], f"{place}.{name}"
        if name == "$ref":
            self._reference(value, there)
        elif name == "enum":
            self._need(isinstance(value, list) and len(value) > 0, there, value, "a list of at least one value")
        elif name in _COMBINED:
            most = 1 if name == "allOf" else math.inf
            allowed = "a list of one schema" if name == "allOf" else "a list of at least one schema"
            self._need(isinstance(value, list) and 1 <= len(value) <= most, there, value, allowed)
            for index, option in enumerate(value):
                self._schema(option, f"{there}[{index}]", level + 1)
            if name == "oneOf":
                self._exclusive(value, there)

    def _exclusive(self, options: list[Any], place: str) -> None:
        for index, (first, second) in enumerate(itertools.combinations(range(len(options)), 2)):
            if index > MOST_PAIRS or not are_exclusive(options[first], options[second], self._root):
                raise InvalidRequestError(
                    f"{_short(place)}: parts {first} and {second} do not exclude each other by their types or by"
                    " constants of a property that both require; give anyOf"
                )

    def _reference(self, value: Any, place: str) -> None:
        parts = value.split("/") if isinstance(value, str) else []
        is_known = value == "#" or (
            len(parts) == 3 and parts[0] == "#" and parts[1] in _REF_ROOTS and parts[2] in self._root.get(parts[1], {})
        )
        self._need(is_known, place, value, '"#", or "#/$defs/NAME" of a schema that is there, is allowed')

    def _types(self, schema: dict[str, Any], place: str) -> list[str]:
        given = schema["type"]
        types = given if isinstance(given, list) else [given]
        for kind in types or [given]:
            is_known = isinstance(kind, str) and kind in KEYWORDS
            self._need(is_known, f"{place}.type", kind, f"one of {', '.join(KEYWORDS)} is allowed")
        return types

    def _typed(self, schema: dict[str, Any], keywords: list[str], place: str, level: int) -> None:
        if "type" in schema:
            types = self._types(schema, place)
        elif "properties" in schema:
            types = ["object"]
        else:
            types = []
        fitting = {name for kind in types for name in KEYWORDS[kind]} | {"type"}
        for name in keywords:
            if name not in fitting:
                needs = [kind for kind, names in KEYWORDS.items() if name in names]
                why = f'needs "type": "{needs[0]}" beside it' if needs else "this keyword cannot be enforced"
                raise InvalidRequestError(f"{_short(place)}.{_short(name)}: {why}")
        for name in _COUNTS:
            if name in schema:
                self._need(_is_count(schema[name]), f"{place}.{name}", schema[name], "a number of 0 or more is allowed")
        for low, high in _PAIRS:
            if low in schema and high in schema and _is_number(schema[low]) and _is_number(schema[high]):
                allowed = f"at least the {low} beside it ({schema[low]}) is allowed"
                self._need(schema[low] <= schema[high], f"{place}.{high}", schema[high], allowed)
        checks: dict[str, Callable[[dict[str, Any], str, int], None]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._number,
            "number": self._number,
        }
        for kind in types:
            if kind in checks:
                checks[kind](schema, place, level)

    def _object(self, schema: dict[str, Any], place: str, level: int) -> None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", False)
        self._need(isinstance(properties, dict), f"{place}.properties", properties, "an object of schemas")
        is_list = isinstance(required, list) and all(isinstance(name, str) for name in required)
        self._need(is_list, f"{place}.required", required, "a list of names is allowed")
        for name, value in properties.items():
            self._schema(value, f"{place}.properties.{name}", level + 1)
        for name in required:
            self._need(name in properties, f"{place}.required", name, "names that stand in properties are allowed")
        if others is False:
            least = schema.get("minProperties", 0)
            self._need(least <= len(properties), f"{place}.minProperties", least, "at most as many as properties has")
        else:
            self._schema(others, f"{place}.additionalProperties", level + 1)
            if "minProperties" in schema:
                raise InvalidRequestError(
                    f"{_short(place)}.minProperties: cannot be enforced beside additionalProperties"
                )

    def _array(self, schema: dict[str, Any], place: str, level: int) -> None:
        first, others = schema.get("prefixItems", []), schema.get("items", True)
        self._need(isinstance(first, list), f"{place}.prefixItems", first, "a list of schemas is allowed")
        for index, value in enumerate(first):
            self._schema(value, f"{place}.prefixItems[{index}]", level + 1)
        most = schema.get("maxItems", len(first))
        self._need(most >= len(first), f"{place}.maxItems", most, "at least as many as prefixItems has are allowed")
        if others is not False:
            self._schema(others, f"{place}.items", level + 1)
        elif schema.get("minItems", 0) > len(first):
            self._need(False, f"{place}.minItems", schema["minItems"], "at most as many as prefixItems has are allowed")

    def _string(self, schema: dict[str, Any], place: str, level: int) -> None:
        given = [name for name in ("pattern", "format") if name in schema]
        lengths = [name for name in ("minLength", "maxLength") if name in schema]
        if len(given) > 1 or (given and lengths):
            other = (lengths or given)[-1]
            raise InvalidRequestError(f"{_short(place)}.{given[0]}: cannot be enforced beside {other}")
        if "pattern" in schema:
            pattern = schema["pattern"]
            self._need(isinstance(pattern, str), f"{place}.pattern", pattern, "a regular expression is allowed")
        if "format" in schema:
            text = schema["format"]
            is_known = isinstance(text, str) and text in FORMATS
            self._need(is_known, f"{place}.format", text, f"one of {', '.join(sorted(FORMATS))} is allowed")

    def _number(self, schema: dict[str, Any], place: str, level: int) -> None:
        bounds = [name for name in _RANGE if name in schema]
        for name in bounds:
            self._need(_is_number(schema[name]), f"{place}.{name}", schema[name], "a number is allowed")
            if "integer" in self._types(schema, place):
                is_whole = schema[name] == int(schema[name])
                self._need(is_whole, f"{place}.{name}", schema[name], "a whole number is allowed beside an integer")
        if "multipleOf" in schema:
            value = schema["multipleOf"]
            is_whole = _is_number(value) and value == int(value) and 1 <= value <= 1000
            self._need(is_whole, f"{place}.multipleOf", value, "a whole number from 1 to 1000 is allowed")
            if bounds:
                raise InvalidRequestError(f"{_short(place)}.multipleOf: cannot be enforced beside {bounds[0]}")

    @staticmethod
    def _need(condition: bool, place: str, value: Any, allowed: str) -> None:
        if not condition:
            raise InvalidRequestError(f"{_short(place)}: {_shown(value)} given, {allowed}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "number": (int, float), "boolean": bool, "null": type(None),
}  # fmt: skip


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, _PYTHON_TYPES[kind])


def _short(place: str) -> str:
    """A place whose names a client chose, cut to a length that a message can carry."""
    return place if len(place) <= 200 else f"{place[:120]}...{place[-77:]}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def schema_text(schema: Any) -> str:
    """A checked schema as its compiler reads it, keys in the client's order."""
    return json.dumps(as_any_of(schema), separators=(",", ":"))
