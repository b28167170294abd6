"""A proof that two schemas exclude each other, from types and constants: then `oneOf` means `anyOf`, which can
be enforced."""

import json
from typing import Any

_ALL_TYPES = frozenset({"object", "array", "string", "number", "boolean", "null"})
_MOST_REFERENCES = 16


def are_exclusive(first: Any, second: Any, root: Any) -> bool:
    """Tell whether no value fits both.

    Args:
        root: what references are to; they are known to be there.
    """
    first, second = _followed(first, root), _followed(second, root)
    if not _types(first, root) & _types(second, root):
        return True
    values, others = _values(first), _values(second)
    if values is not None and others is not None and not values & others:
        return True
    return _are_told_apart(first, second, root)


def as_any_of(schema: Any) -> Any:
    """The schema with `anyOf` in place of every `oneOf`, all of whose parts exclude each other."""
    if isinstance(schema, list):
        return [as_any_of(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    literal = {"enum", "const", "default", "examples"}
    return {
        "anyOf" if name == "oneOf" else name: value
        if name in literal
        else {key: as_any_of(part) for key, part in value.items()}
        if name in ("properties", "$defs", "definitions") and isinstance(value, dict)
        else as_any_of(value)
        for name, value in schema.items()
    }


def _followed(schema: Any, root: Any) -> Any:
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        parts = schema["$ref"].split("/")
        schema = root if len(parts) == 1 else root[parts[1]][parts[2]]
    return schema


def _types(schema: Any, root: Any) -> frozenset[str]:
    """The types of what may fit; a whole number is a number."""
    if not isinstance(schema, dict):
        return _ALL_TYPES
    values = _values(schema)
    if values is not None:
        return frozenset(_type_of(json.loads(value)) for value in values)
    given = schema.get("type", "object" if "properties" in schema else None)
    if given is None:
        return _ALL_TYPES
    types = given if isinstance(given, list) else [given]
    return frozenset("number" if kind == "integer" else kind for kind in types)


def _type_of(value: Any) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _values(schema: Any) -> frozenset[str] | None:
    """The only values that fit, as JSON; None where that is not said."""
    if not isinstance(schema, dict) or not {"enum", "const"} & schema.keys():
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    return frozenset(json.dumps(value, sort_keys=True) for value in values)


def _are_told_apart(first: Any, second: Any, root: Any) -> bool:
    """Tell whether a property that both need has values that exclude each other."""
    if not all(isinstance(schema, dict) and _types(schema, root) == {"object"} for schema in (first, second)):
        return False
    needed = set(first.get("required", ())) & set(second.get("required", ()))
    for name in needed & first.get("properties", {}).keys() & second.get("properties", {}).keys():
        values, others = (_values(_followed(schema["properties"][name], root)) for schema in (first, second))
        if values is not None and others is not None and not values & others:
            return True
    return False
