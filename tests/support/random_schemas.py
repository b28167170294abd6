"""JSON schemas of what can be enforced, with a text of every one of them bounded."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = ("a", "b", "name", "city name", "größe", 'q"uote', "x_1", "kind", "tags", "ü", "z" * 20)
PATTERNS = ("^[a-f]{2,4}$", "^(ab|c)+$", r"^\d{1,3}(-\d{2})?$", "^[^b]{1,3}$", r"^\w.\w$", "^$")
FORMATS = ("date", "time", "uuid", "ipv4", "date-time")
DEPTH = 3


def random_schema(draw: random.Random) -> Schema:
    """A schema with parts under `$defs`, now and then."""
    definitions: dict[str, Any] = {}
    if draw.random() < 0.3:
        definitions = {name: _schema(draw, 1, ()) for name in draw.sample(("n", "leaf"), draw.randint(1, 2))}
    schema = _schema(draw, DEPTH, tuple(definitions))
    return {**schema, "$defs": definitions} if definitions else schema


def object_schema(draw: random.Random) -> Schema:
    """A schema of an object."""
    return _object(draw, DEPTH - 1, ())


def _schema(draw: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    simple: list[Callable[[random.Random], Schema]] = [_string, _integer, _number, _enum, _const, _plain]
    if definitions and draw.random() < 0.2:
        return {"$ref": f"#/$defs/{draw.choice(definitions)}"}
    if depth == 0 or draw.random() < 0.3:
        return draw.choice(simple)(draw)
    kind = draw.choice((_object, _object, _array, _any_of, _one_of))
    schema = kind(draw, depth, definitions)
    return {**schema, "description": "d", "title": "t"} if draw.random() < 0.2 else schema


def _string(draw: random.Random) -> Schema:
    kind = draw.random()
    if kind < 0.3:
        return {"type": "string", "pattern": draw.choice(PATTERNS)}
    if kind < 0.45:
        return {"type": "string", "format": draw.choice(FORMATS)}
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 6)}


def _integer(draw: random.Random) -> Schema:
    low = draw.randint(-1200, 1200)
    names = draw.choice((("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")))
    return {"type": "integer", **dict(zip(names, (low, low + draw.randint(2, 900)), strict=True))}


def _number(draw: random.Random) -> Schema:
    low = round(draw.uniform(-20, 20), draw.randint(0, 2))
    return {"type": "number", "minimum": low, "maximum": low + draw.choice((0.5, 1, 7.25))}


def _enum(draw: random.Random) -> Schema:
    values = [1, -2.5, "a", 'b"\\', "ü 🙂", None, True, {"k": [1, {"m": []}]}, [], "a b"]
    return {"enum": draw.sample(values, draw.randint(1, 4))}


def _const(draw: random.Random) -> Schema:
    return {"const": draw.choice(("x", 12, {"a": 1, "b": [None]}, False, ""))}


def _plain(draw: random.Random) -> Schema:
    return draw.choice(({"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}))


def _object(draw: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    names = draw.sample(NAMES, draw.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _schema(draw, depth - 1, definitions) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
    }
    if draw.random() < 0.5:
        schema["additionalProperties"] = False
    if names and draw.random() < 0.15:
        most = draw.randint(max(1, len(schema["required"])), len(names))
        schema |= {"maxProperties": most, "minProperties": draw.randint(len(schema["required"]), most)}
    return schema


def _array(draw: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    first = [_schema(draw, depth - 1, definitions) for _ in range(draw.choice((0, 0, 1, 2)))]
    schema: Schema = {"type": "array", **({"prefixItems": first} if first else {})}
    if draw.random() < 0.2 and first:
        return {**schema, "items": False, "minItems": draw.randint(0, len(first))}
    least = len(first) + draw.randint(0, 1)
    items = _schema(draw, depth - 1, definitions)
    return {**schema, "items": items, "minItems": least, "maxItems": least + draw.randint(0, 2)}


def _any_of(draw: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    return {"anyOf": [_schema(draw, depth - 1, definitions) for _ in range(draw.randint(1, 3))]}


def _one_of(draw: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    """Parts of types that exclude each other."""
    parts = [_string(draw), _integer(draw), {"type": "null"}, {"type": "boolean"}]
    return {"oneOf": draw.sample(parts, draw.randint(1, 3))}
