"""The fields that say what a reply must look like, and what each wrong value is told."""

import json
import re
from typing import Any

import pytest

from kimi_backend.errors import InvalidRequestError
from kimi_backend.serving.grammar_fields import MOST_CALLS, grammar_of
from kimi_backend.types.grammar import (
    CallTokens,
    Choice,
    Ebnf,
    Either,
    Grammar,
    JsonSchema,
    Regex,
    Tool,
    ToolCalls,
)
from support.tiny_tokenizers import tempting_tokenizer

CONTROLS = tempting_tokenizer().control_tokens
TOKENS = CallTokens.of(CONTROLS)
assert TOKENS is not None
THINK_END = CONTROLS["</think>"]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "g", "parameters": SCHEMA, "strict": True}}
BARE = {"type": "function", "function": {"name": "h"}}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
OBJECT = '{"type":"object"}'
NO_ARGUMENTS = '{"type":"object","properties":{}}'
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    "values", [{}, {"response_format": {"type": "text"}}, {"tools": [TOOL]}, {"tool_choice": "none"}]
)
def test_most_replies_may_be_anything(values: dict[str, Any]) -> None:
    assert grammar_of(values, CONTROLS, None) is None


@pytest.mark.parametrize(
    ("field", "value", "form"),
    [
        ("response_format", {"type": "json_object"}, JsonSchema(OBJECT)),
        ("response_format", AS_SCHEMA, JsonSchema(TEXT)),
        ("structured_outputs", {"json": SCHEMA}, JsonSchema(TEXT)),
        ("structured_outputs", {"json": TEXT, "regex": None, "disable_any_whitespace": True}, JsonSchema(TEXT)),
        ("structured_outputs", {"json_object": True}, JsonSchema(OBJECT)),
        ("structured_outputs", {"regex": "a+"}, Regex("a+")),
        ("structured_outputs", {"choice": ["a", "b"]}, Choice(("a", "b"))),
        ("structured_outputs", {"grammar": 'root ::= "a"'}, Ebnf('root ::= "a"')),
    ],
)
def test_content(field: str, value: dict[str, Any], form: object) -> None:
    assert grammar_of({field: value}, CONTROLS, None) == Grammar(form, field)  # type: ignore[arg-type]
    assert grammar_of({field: value}, CONTROLS, THINK_END) == Grammar(form, field, THINK_END)  # type: ignore[arg-type]


def calls(*tools: Tool, first: int = 0, most: int = MOST_CALLS, is_section_begun: bool = False) -> ToolCalls:
    assert TOKENS is not None
    return ToolCalls(tools, TOKENS, first, most, is_section_begun)


def test_forced_calls() -> None:
    f, h = Tool("f", TEXT), Tool("h", NO_ARGUMENTS)
    tools: dict[str, Any] = {"tools": [TOOL, BARE], "messages": [{"role": "assistant", "tool_calls": [CALL, CALL]}]}
    required = grammar_of({**tools, "tool_choice": "required"}, CONTROLS, THINK_END)
    assert required == Grammar(calls(f, h, first=2), "tool_choice", THINK_END)
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    assert grammar_of({**tools, **one}, CONTROLS, None) == Grammar(calls(f, h, first=2, most=1), "tool_choice")
    only = grammar_of({**tools, "tool_choice": named("h")}, CONTROLS, None)
    assert only == Grammar(calls(h, first=2, most=1), "tool_choice")


def test_strict_tools_follow_their_schemas_where_the_model_calls_them() -> None:
    grammar = grammar_of({"tools": [TOOL, STRICT]}, CONTROLS, THINK_END)
    form = calls(Tool("f", OBJECT), Tool("g", TEXT), is_section_begun=True)
    assert grammar == Grammar(form, "tools", CONTROLS["<|tool_calls_section_begin|>"], must_begin=False)
    assert grammar_of({"tools": [STRICT], "tool_choice": "none"}, CONTROLS, None) is None


def test_content_of_a_form_or_calls() -> None:
    values = {"tools": [TOOL], "response_format": AS_SCHEMA}
    either = Either((JsonSchema(TEXT), calls(Tool("f", OBJECT))))
    assert grammar_of(values, CONTROLS, None) == Grammar(either, "response_format")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"response_format": "json"}, "response_format: 'json' given"),
        ({"response_format": {"type": "xml"}}, "response_format: "),
        ({"response_format": {"type": "json_schema"}}, "response_format: "),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema: no"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "not": {}}}}},
            "response_format.json_schema.schema.not: this keyword cannot be enforced",
        ),
        ({"structured_outputs": {}}, "structured_outputs: {} given, an object with one of json, regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs: "),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs: "),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json: not valid JSON"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex: '' given"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: [] given"),
        ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice[1]: 3 given"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object: False given"),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": False}},
            "structured_outputs.disable_any_whitespace: only true",
        ),
        ({"structured_outputs": {"json": {}}, "response_format": AS_SCHEMA}, "structured_outputs: given beside"),
        ({"tool_choice": "required"}, "tool_choice: 'required' given, it needs tools"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice: 'any' given, auto, none, required or"),
        ({"tool_choice": named("x"), "tools": [TOOL]}, "tool_choice: 'x' given, one of 'f' is allowed"),
        (
            {"tool_choice": "required", "tools": [TOOL], "response_format": AS_SCHEMA},
            "tool_choice: 'required' given, auto or none is allowed beside response_format",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [TOOL, {"function": {"name": "k", "parameters": {"type": "object", "x": 1}}}],
            },
            "tools[1].function.parameters.x: this keyword",
        ),
        (
            {"tool_choice": "required", "tools": [{"function": {"name": "k", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type: 'array' given",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_its_place(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{re.escape(message)}"):
        grammar_of(values, CONTROLS, None)


def test_calls_need_their_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="tool_choice: the model's tokenizer has no tokens for calls"):
        grammar_of({"tool_choice": "required", "tools": [TOOL]}, {}, None)
