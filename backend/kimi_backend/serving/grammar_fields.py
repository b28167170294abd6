"""The fields of a request that say what its reply must look like -> one grammar."""

from collections.abc import Callable, Mapping
from typing import Any

from kimi_backend.errors import InvalidRequestError
from kimi_backend.grammar.schema_checks import check_schema, schema_text
from kimi_backend.serving.bounded_json import parse_json
from kimi_backend.serving.request_values import shown
from kimi_backend.text.unicode_text import require_valid_unicode
from kimi_backend.types.grammar import (
    CallTokens,
    Choice,
    Ebnf,
    Either,
    Form,
    Grammar,
    JsonSchema,
    Regex,
    Tool,
    ToolCalls,
)

MOST_CALLS = 32
"""The most calls of a reply whose calls follow a grammar."""
MOST_CHOICES = 1024
_OBJECT = '{"type":"object"}'
_ANNOTATIONS = ("name", "description", "strict")
_ALWAYS_SO = ("disable_any_whitespace", "disable_additional_properties")
"""Options of vLLM that are true here, whoever asks."""


def grammar_of(
    values: Mapping[str, Any], control_tokens: Mapping[str, int], thoughts_end: int | None
) -> Grammar | None:
    """
    Args:
        values: a request's fields, its tools checked.
        control_tokens: the tokenizer's.
        thoughts_end: the token that ends the thoughts which the prompt ends inside; None where it does not.

    Returns:
        None where the reply may be anything.

    Raises:
        InvalidRequestError: a field is wrong or cannot be enforced; names the place.
    """
    content = _content(values)
    choice = _tool_choice(values)
    tools = _functions(values) if choice != "none" else []
    is_forced = choice not in ("auto", "none")
    if is_forced and content is not None:
        raise InvalidRequestError(f"tool_choice: {shown(choice)} given, auto or none is allowed beside {content[0]}")
    if is_forced:
        forced = _calls(values, tools, choice, control_tokens)
        return Grammar(forced, "tool_choice", begins_after=thoughts_end)
    is_strict = any(function.get("strict") is True for function in tools)
    if content is not None:
        field, form = content
        if tools:
            form = Either((form, _calls(values, tools, "strict" if is_strict else "auto", control_tokens)))
        return Grammar(form, field, begins_after=thoughts_end)
    if is_strict:
        calls = _calls(values, tools, "strict", control_tokens, is_section_begun=True)
        return Grammar(calls, "tools", begins_after=calls.tokens.section_begin, must_begin=False)
    return None


def _content(values: Mapping[str, Any]) -> tuple[str, Form] | None:
    """The field that says what the reply's content is, and that."""
    form, structured = _response_format(values.get("response_format")), values.get("structured_outputs")
    if structured is None:
        return None if form is None else ("response_format", form)
    if form is not None:
        raise InvalidRequestError("structured_outputs: given beside response_format; give one of them")
    return "structured_outputs", _structured_outputs(structured)


def _response_format(value: Any) -> Form | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonSchema(_OBJECT)
    if kind != "json_schema" or not isinstance(value.get("json_schema"), dict):
        allowed = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}'
        raise InvalidRequestError(f"response_format: {shown(value)} given, {allowed} is allowed")
    inner = value["json_schema"]
    unknown = [name for name in inner if name not in ("schema", *_ANNOTATIONS)]
    if unknown or "schema" not in inner:
        what = f"{shown(unknown[0])} given" if unknown else "no schema given"
        raise InvalidRequestError(
            f"response_format.json_schema: {what}, schema and {', '.join(_ANNOTATIONS)} are allowed"
        )
    return _schema(inner["schema"], "response_format.json_schema.schema")


def _schema(schema: Any, place: str) -> JsonSchema:
    check_schema(schema, place)
    return JsonSchema(schema_text(schema))


def _structured_outputs(value: Any) -> Form:
    given = {name: inner for name, inner in value.items() if inner is not None} if isinstance(value, dict) else {}
    for name in _ALWAYS_SO:
        if given.pop(name, True) is not True:
            raise InvalidRequestError(f"structured_outputs.{name}: only true is supported")
    if len(given) != 1 or next(iter(given)) not in _STRUCTURES:
        allowed = f"an object with one of {', '.join(_STRUCTURES)} is allowed"
        raise InvalidRequestError(f"structured_outputs: {shown(value)} given, {allowed}")
    ((name, inner),) = given.items()
    return _STRUCTURES[name](inner, f"structured_outputs.{name}")


def _json_structure(value: Any, place: str) -> Form:
    if isinstance(value, str):
        value = parse_json(place, value)
    return _schema(value, place)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{place}: {shown(value)} given, a text is allowed")
    require_valid_unicode(value, place)
    return value


def _choice(value: Any, place: str) -> Form:
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_CHOICES:
        raise InvalidRequestError(f"{place}: {shown(value)} given, a list of 1 to {MOST_CHOICES} texts is allowed")
    return Choice(tuple(_text(text, f"{place}[{index}]") for index, text in enumerate(value)))


def _json_object(value: Any, place: str) -> Form:
    if value is not True:
        raise InvalidRequestError(f"{place}: {shown(value)} given, only true is allowed")
    return JsonSchema(_OBJECT)


_STRUCTURES: dict[str, Callable[[Any, str], Form]] = {
    "json": _json_structure,
    "regex": lambda value, place: Regex(_text(value, place)),
    "choice": _choice,
    "grammar": lambda value, place: Ebnf(_text(value, place)),
    "json_object": _json_object,
}


def _tool_choice(values: Mapping[str, Any]) -> str | tuple[str]:
    """A word, or the name of the one tool."""
    value = values.get("tool_choice", "auto")
    if value in ("auto", "none", "required"):
        choice: str | tuple[str] = value
    else:
        function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            allowed = 'auto, none, required or {"type": "function", "function": {"name": ...}}'
            raise InvalidRequestError(f"tool_choice: {shown(value)} given, {allowed} is allowed")
        choice = (name,)
    if choice not in ("auto", "none") and not values.get("tools"):
        raise InvalidRequestError(f"tool_choice: {shown(value)} given, it needs tools")
    return choice


def _functions(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = values.get("tools")
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return [function for function in functions if isinstance(function, dict)]  # the chat template refuses others


def _calls(
    values: Mapping[str, Any],
    functions: list[dict[str, Any]],
    choice: str | tuple[str],
    control_tokens: Mapping[str, int],
    *,
    is_section_begun: bool = False,
) -> ToolCalls:
    """choice: as `tool_choice`, or "strict": arguments follow the schemas of strict tools, others' are any object."""
    tokens = CallTokens.of(control_tokens)
    if tokens is None:
        raise InvalidRequestError("tool_choice: the model's tokenizer has no tokens for calls")
    tools = []
    for index, function in enumerate(functions):
        follows = choice not in ("auto", "strict") or function.get("strict") is True
        if isinstance(choice, tuple) and function["name"] != choice[0]:
            continue
        schema = _parameters(function, f"tools[{index}].function.parameters") if follows else _OBJECT
        tools.append(Tool(function["name"], schema))
    if not tools:
        assert isinstance(choice, tuple)
        names = ", ".join(function["name"] for function in functions)
        raise InvalidRequestError(f"tool_choice: {shown(choice[0])} given, one of {shown(names)} is allowed")
    is_one = isinstance(choice, tuple) or values.get("parallel_tool_calls") is False
    number = _num_calls(values.get("messages"))
    return ToolCalls(tuple(tools), tokens, number, 1 if is_one else MOST_CALLS, is_section_begun)


def _parameters(function: Mapping[str, Any], place: str) -> str:
    """The schema of a tool's arguments, an object; none takes no arguments."""
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    check_schema(schema, place)
    if schema.get("type", "object") != "object":
        raise InvalidRequestError(f'{place}.type: {shown(schema["type"])} given, "object" is allowed')
    if "type" not in schema and "properties" not in schema:
        schema = {**schema, "type": "object"} if not {"$ref", "anyOf", "oneOf", "allOf"} & schema.keys() else schema
    return schema_text(schema)


def _num_calls(messages: Any) -> int:
    """Calls of the history, which the chat template numbers from 0."""
    turns = [message.get("tool_calls") for message in messages or [] if isinstance(message, dict)]
    return sum(len(calls) for calls in turns if isinstance(calls, list))
