"""Schemas that can be enforced pass; others are refused by their place."""

import contextlib
import itertools
import json
import re

import pytest

from kimi_backend.errors import InvalidRequestError
from kimi_backend.grammar.schema_checks import KEYWORDS, check_schema, schema_text

PASSING = [
    True,
    {},
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "description": "d"}}, "required": ["a"]},
    {"type": ["string", "null"], "maxLength": 3},
    {"properties": {"a": {"type": "boolean"}}},
    {"$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}}, "$ref": "#/$defs/n"},
    {"enum": [1, "a", None], "title": "t"},
    {"type": "string", "enum": ["a", "b"]},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
    {"type": "object", "additionalProperties": {"type": "number", "exclusiveMaximum": 2.5}, "maxProperties": 3},
    {"allOf": [{"const": {"a": [1]}}]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": ["integer", "null"]}, {"enum": [True, []]}]},
    {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {
            name: {
                "type": "object",
                "properties": {"kind": {"const": name}, "n": {"type": "null"}},
                "required": ["n", "kind"],
            }
            for name in ("cat", "dog")
        },
    },
    {"type": "integer", "multipleOf": 7},
    {"type": "string", "format": "date-time"},
]
REFUSED = [
    (False, r"f: false given, a schema"),
    (3, r"f: 3 given"),
    ({"type": "objec"}, r'f.type: "objec" given, one of object'),
    ({"type": "object", "properties": {"a": {"not": {}}}}, r"f.properties.a.not: this keyword cannot be enforced"),
    ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, r"f.items.uniqueItems: this keyword"),
    ({"type": "object", "patternProperties": {}}, r"f.patternProperties: this keyword"),
    ({"if": {}, "then": {}}, r"f.if: this keyword"),
    ({"type": "integer", "minimum": 10**400}, r"f.minimum: 10+\.\.\. given, a number is allowed"),
    ({"type": "integer", "multipleOf": 10**400}, r"f.multipleOf: 10+\.\.\. given, a whole number from 1"),
    ({"type": "number", "maximum": float("-inf")}, r"f.maximum: -Infinity given, a number is allowed"),
    ({"type": "integer", "const": float("inf")}, r"f.const: Infinity is not of the type beside it"),
    ({"type": "integer", "enum": [1, float("nan")]}, r"f.enum: NaN is not of the type beside it"),
    ({"minimum": 3}, r'f.minimum: needs "type": "integer" beside it'),
    ({"type": "integer", "maxLength": 3}, r'f.maxLength: needs "type": "string" beside it'),
    ({"type": "object", "properties": {}, "required": ["b"]}, r'f.required: "b" given, names that stand in'),
    ({"type": "object", "minProperties": 1}, r"f.minProperties: 1 given, at most as many"),
    ({"type": "object", "minProperties": 1, "additionalProperties": True}, r"f.minProperties: cannot be enforced"),
    ({"type": "object", "properties": {"a": False}}, r"f.properties.a: false given"),
    ({"$ref": "#/definitions/x"}, r'f.\$ref: "#/definitions/x" given'),
    ({"$ref": "http://a/b"}, r"f.\$ref: "),
    ({"$defs": {"a": {"bad": 1}}}, r"f.\$defs.a.bad: this keyword"),
    ({"$defs": {"a": {}}, "$ref": "#/$defs/a", "type": "null"}, r"f.type: cannot be enforced beside \$ref"),
    ({"anyOf": []}, r"f.anyOf: \[\] given, a list of at least one schema"),
    ({"anyOf": [{"type": "null"}, {"x": 1}]}, r"f.anyOf\[1\].x: this keyword"),
    ({"anyOf": [{}], "properties": {}}, r"f.properties: cannot be enforced beside anyOf"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, r"f.oneOf: parts 0 and 1 do not exclude each other"),
    ({"oneOf": [{"type": "null"}, {"enum": [1]}, {"enum": [2, 1]}]}, r"f.oneOf: parts 1 and 2 do not"),
    ({"oneOf": [{"type": "null"}, {}]}, r"f.oneOf: parts 0 and 1 do not"),
    (
        {"oneOf": [{"type": "object", "properties": {"a": {"const": n}}, "required": []} for n in (1, 2)]},
        r"f.oneOf: parts 0 and 1 do not",
    ),
    ({"allOf": [{}, {}]}, r"f.allOf: .* given, a list of one schema"),
    ({"enum": []}, r"f.enum: \[\] given"),
    ({"type": "string", "enum": ["a", 3]}, r"f.enum: 3 is not of the type"),
    ({"type": "integer", "const": True}, r"f.const: true is not of the type"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, r"f.pattern: cannot be enforced beside maxLength"),
    ({"type": "string", "format": "regex"}, r'f.format: "regex" given, one of date'),
    ({"type": "string", "minLength": 5, "maxLength": 3}, r"f.maxLength: 3 given, at least the minLength"),
    ({"type": "integer", "minimum": 1.5}, r"f.minimum: 1.5 given, a whole number"),
    ({"type": "integer", "multipleOf": 2.5}, r"f.multipleOf: 2.5 given"),
    ({"type": "integer", "multipleOf": 2, "minimum": 3}, r"f.multipleOf: cannot be enforced beside minimum"),
    ({"type": "number", "multipleOf": 2}, r'f.multipleOf: needs "type": "integer"'),
    ({"type": "array", "items": [{}]}, r"f.items: \[\{\}\] given"),
    ({"type": "array", "minItems": -1}, r"f.minItems: -1 given"),
    ({"type": "array", "prefixItems": [{}, {}], "maxItems": 1}, r"f.maxItems: 1 given"),
    ({"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}, r"f.minItems: 2 given"),
]


@pytest.mark.parametrize("schema", PASSING)
def test_what_can_be_enforced_passes(schema: object) -> None:
    check_schema(schema, "f")


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_the_rest_is_refused_by_its_place(schema: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        check_schema(schema, "f")


def test_one_of_is_compiled_as_any_of() -> None:
    schema = {"properties": {"oneOf": {"oneOf": [{"type": "null"}, {"const": {"oneOf": [1]}}]}}}
    check_schema(schema, "f")
    expected = '{"properties":{"oneOf":{"anyOf":[{"type":"null"},{"const":{"oneOf":[1]}}]}}}'
    assert schema_text(schema) == expected


def test_a_deep_schema_is_refused_and_its_place_is_cut() -> None:
    schema: object = {"type": "null"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequestError, match=re.escape("more than 64 levels deep")) as caught:
        check_schema(schema, "f")
    assert len(str(caught.value)) < 300


HOSTILE = (
    0,
    -1,
    10**400,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    None,
    True,
    "",
    "\ud800",
    [],
    [[]],
    {},
    {"": 1},
    "#/$defs",
)


@pytest.mark.parametrize("kind", KEYWORDS)
def test_any_value_of_any_keyword_is_taken_or_refused(kind: str) -> None:
    names = (*KEYWORDS[kind], "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "type", "title")
    for name, value, is_listed in itertools.product(names, HOSTILE, (False, True)):
        schema = {"type": kind, name: [value] if is_listed else value}
        for around in (schema, {"type": "array", "items": schema}, {"oneOf": [schema, {"type": "null"}]}):
            with contextlib.suppress(InvalidRequestError):
                check_schema(around, "f")
                json.loads(schema_text(around))
