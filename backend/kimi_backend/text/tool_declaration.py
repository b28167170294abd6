"""Tool declarations as TypeScript, the form Kimi-K2.5 and later were trained on.

Their chat template takes this text in the variable `tools_ts_str`, and falls back on JSON without it. The checkpoints
build it with Python code of their own, which is never run; this is the same format, written anew:

    # Tools

    ## functions
    namespace functions {
    // what the function does
    type NAME = (_: {
      // what the parameter means
      // maximum: 10, minimum: 0
      // Default: 3
      PARAMETER?: number
    }) => any;
    }

Required parameters come first, then optional ones, each group by name; schemas under `$defs` become interfaces.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_INDENT = "  "
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION_NAMES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}


class _UnsupportedSchemaError(Exception):
    """The format has no word for this schema."""


def declare_tools(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The declarations, for tools checked by `chat_messages.check_tools`.

    Returns:
        None when a schema cannot be written this way; the template then declares the tools as JSON.
    """
    try:
        functions = [_declare_function(function) for function in (sort_keys(tool["function"]) for tool in tools)]
    except (_UnsupportedSchemaError, AttributeError, KeyError, TypeError, ValueError):
        return None
    return "\n".join(["# Tools", "", "## functions", "namespace functions {", *functions, "}", ""])


def sort_keys(value: Any) -> Any:
    """A JSON value with the keys of every object in order: one tool list, one prompt, so prefixes can be cached."""
    if isinstance(value, Mapping):
        return {key: sort_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [sort_keys(item) for item in value]
    return value


def _declare_function(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    definitions = dict(parameters.get("$defs") or {})
    refers_to_itself = any(schema.get("$ref") == "#" for schema in _subschemas(parameters))
    lines = []
    if refers_to_itself:
        # Here, unlike everywhere else, required parameters do not come first and extra keys go unsaid.
        properties = parameters.get("properties") or {}
        required = parameters.get("required") or ()
        fields = [_field(name, properties[name], name in required, definitions, _INDENT) for name in sorted(properties)]
        lines.append("interface parameters {" + ("\n" + ",\n".join(fields) + "\n" if fields else "") + "}")
    for name, schema in definitions.items():
        lines.extend(_comment(schema.get("description"), ""))
        lines.append(f"interface {name} {_type(schema, definitions, '')}")
    lines.extend(_comment(function.get("description"), ""))
    argument = "parameters" if refers_to_itself else _object(parameters, definitions, "")
    lines.append(f"type {function['name']} = (_: {argument}) => any;")
    return "\n".join(lines)


def _subschemas(value: Any) -> Iterable[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        for item in value.values():
            yield from _subschemas(item)
    elif isinstance(value, list):
        for item in value:
            yield from _subschemas(item)


def _object_fields(schema: Mapping[str, Any], definitions: Mapping[str, Any], indent: str) -> list[str]:
    properties = schema.get("properties") or {}
    required = set(schema.get("required") or ())
    ordered = sorted(properties, key=lambda name: (name not in required, name))
    fields = [_field(name, properties[name], name in required, definitions, indent) for name in ordered]
    extra = schema.get("additionalProperties")
    if extra is not None:
        kind = {True: "any", False: "never"}[extra] if isinstance(extra, bool) else _type(extra, definitions, indent)
        fields.append(f"{indent}[k: string]: {kind}")
    return fields


def _field(name: str, schema: Any, is_required: bool, definitions: Mapping[str, Any], indent: str) -> str:
    """A parameter: its comments, its default, its line."""
    lines = _comments(schema, indent)
    default = schema.get("default") if isinstance(schema, Mapping) else None
    if default is not None:
        shown = repr(default) if isinstance(default, (bool, int, float)) else json.dumps(default, ensure_ascii=False)
        lines.append(f"{indent}// Default: {shown}")
    return "\n".join([*lines, f"{indent}{name}{'' if is_required else '?'}: {_type(schema, definitions, indent)}"])


def _object(schema: Mapping[str, Any], definitions: Mapping[str, Any], indent: str) -> str:
    fields = _object_fields(schema, definitions, indent + _INDENT)
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def _type(schema: Any, definitions: Mapping[str, Any], indent: str) -> str:
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if "$ref" in schema:
        return _reference(schema["$ref"], definitions)
    if "anyOf" in schema:
        return " | ".join(_type(option, definitions, indent) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_UNION_NAMES[name] for name in kind)
    if kind == "object":
        return _object(schema, definitions, indent)
    if kind == "array":
        return _array(schema.get("items") or {}, definitions, indent)
    if isinstance(kind, str):
        return "number" if kind == "integer" else kind
    if not schema:
        return "any"
    raise _UnsupportedSchemaError(schema)


def _array(item: Any, definitions: Mapping[str, Any], indent: str) -> str:
    inner = indent + _INDENT
    comments = _comments(item, inner)
    if not comments:
        return f"Array<{_type(item, definitions, indent)}>"
    return "\n".join(["Array<", *comments, f"{inner}{_type(item, definitions, inner)}", f"{indent}>"])


def _reference(reference: str, definitions: Mapping[str, Any]) -> str:
    if reference == "#":
        return "parameters"
    name = reference.removeprefix("#/$defs/")
    if name == reference or name not in definitions:
        raise _UnsupportedSchemaError(reference)
    return name


def _comments(schema: Any, indent: str) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    lines = _comment(schema.get("description"), indent)
    kind = schema.get("type")
    allowed = (
        () if {"$ref", "anyOf", "enum"} & set(schema) else _CONSTRAINTS.get(kind if isinstance(kind, str) else "", ())
    )
    constraints = [f"{key}: {schema[key]}" for key in allowed if key in schema]
    return [*lines, f"{indent}// {', '.join(constraints)}"] if constraints else lines


def _comment(description: str | None, indent: str) -> list[str]:
    return [f"{indent}// {line}" if line else "" for line in description.split("\n")] if description else []
