"""Each way a conversation can be malformed is named."""

from typing import Any

import pytest

from kimi_backend.errors import InvalidRequestError
from kimi_backend.text.chat_messages import check_messages, check_template_kwargs, check_tools


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


USER = {"role": "user", "content": "hi"}
CALL = {"function": {"name": "f", "arguments": "{}"}}
BROKEN_MESSAGES = {
    "none": (None, "messages is None; a list"),
    "empty": ([], r"messages is \[\]; a list with at least one"),
    "text": ("hi", "messages is 'hi'; a list"),
    "not an object": ([USER, 3], r"messages\[1\] is 3; an object"),
    "no role": ([{"content": "x"}], r"messages\[0\].role is None; allowed: system, developer, user"),
    "odd role": ([USER, {"role": "<|im_user|>", "content": "x"}], r"messages\[1\].role is '<\|im_user\|>'"),
    "no content": ([{"role": "user"}], r"messages\[0\].content is missing"),
    "assistant without anything": ([{"role": "assistant", "content": None}], r"messages\[0\].content is missing"),
    "content is a number": ([{"role": "user", "content": 3}], r"messages\[0\].content is 3"),
    "image": (
        [USER, {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "image_url", "image_url": {}}]}],
        r"messages\[1\].content\[1\].type is 'image_url'; this server reads text only",
    ),
    "part is text": ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\] is 'x'"),
    "part without text": ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text is None"),
    "surrogate": (
        [{"role": "user", "content": "a\ud800"}],
        r"\[0\].content: character 1 is the lone surrogate",
    ),
    "surrogate in a part": (
        [{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}],
        r"messages\[0\].content\[0\].text: character 0",
    ),
    "surrogate in a name": ([{**USER, "name": "\ud800"}], r"messages\[0\].name: character 0"),
    "surrogate in a key": ([{**USER, "x": {"\ud800": 1}}], r"a key of messages\[0\].x: character 0"),
    "name is a number": ([{**USER, "name": 3}], r"messages\[0\].name is 3; text"),
    "calls are an object": ([{"role": "assistant", "tool_calls": {}, "content": ""}], "tool_calls is {}; a list"),
    "call without a function": (
        [{"role": "assistant", "tool_calls": [CALL, {"id": "x"}]}],
        r"messages\[0\].tool_calls\[1\].function.name must be text",
    ),
    "arguments are a list": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}],
        r"tool_calls\[0\].function.arguments must be JSON text or an object",
    ),
    "id is a number": ([{"role": "assistant", "tool_calls": [{**CALL, "id": 3}]}], r"tool_calls\[0\].id is 3"),
    "a user calls": ([{**USER, "tool_calls": [CALL]}], r"only an assistant calls tools; the role is 'user'"),
    "deep": ([{**USER, "x": nested(100)}], "is nested deeper than 64 levels"),
    "bytes": ([{**USER, "x": b"y"}], r"messages\[0\].x is a bytes; JSON values"),
    "continued in the middle": ([{"role": "assistant", "content": "", "prefix": True}, USER], r"messages\[0\].partial"),
    "continued user": ([{**USER, "partial": True}], r"messages\[0\].partial: true given, only an assistant's"),
    "partial is text": ([{**USER, "partial": "yes"}], r"messages\[0\].partial is 'yes'; true or false"),
    "key is a number": ([{**USER, "x": {3: "y"}}], r"messages\[0\].x has the key 3"),
}


@pytest.mark.parametrize("case", BROKEN_MESSAGES)
def test_malformed_messages_are_named(case: str) -> None:
    messages, message = BROKEN_MESSAGES[case]
    with pytest.raises(InvalidRequestError, match=message):
        check_messages(messages)


BROKEN_TOOLS = {
    "object": ({}, "tools is {}; a list"),
    "no type": ([{"function": {"name": "f"}}], r'tools\[0\].type must be "function"'),
    "no function": ([{"type": "function"}], r"tools\[0\].function.name must be text; got None"),
    "empty name": ([{"type": "function", "function": {"name": ""}}], r"tools\[0\].function.name must be text"),
    "strict": (
        [{"type": "function", "function": {"name": "f", "strict": "yes"}}],
        r"tools\[0\].function.strict must be true or false; got",
    ),
    "parameters are a list": (
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        r"tools\[0\].function.parameters must be a JSON schema object; got \[\]",
    ),
}


@pytest.mark.parametrize("case", BROKEN_TOOLS)
def test_malformed_tools_are_named(case: str) -> None:
    tools, message = BROKEN_TOOLS[case]
    with pytest.raises(InvalidRequestError, match=message):
        check_tools(tools)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ([], r"chat_template_kwargs is \[\]; an object"),
        ({"messages": []}, "chat_template_kwargs.messages is set by the server"),
        ({"bos_token": "x"}, "chat_template_kwargs.bos_token is set by the server"),
        ({"a b": 1}, "has the key 'a b'; a variable name"),
        ({"x": "\ud800"}, "chat_template_kwargs.x: character 0"),
        ({"thinkin": 1}, r"chat_template_kwargs.thinkin: .* does not read it \(is thinking meant"),
        ({"zzz": 1}, "chat_template_kwargs.zzz: .* does not read it; it reads persona, thinking$"),
    ],
)
def test_malformed_template_arguments_are_named(kwargs: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_template_kwargs(kwargs, {"thinking", "persona", "messages"})


def test_a_copy_is_checked_and_the_original_stays() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": {"id": "x"}}]
    checked = check_messages(messages)
    assert checked == [{"role": "assistant", "content": "", "tool_calls": [CALL], "audio": {"id": "x"}}]
    checked[0]["tool_calls"][0]["function"]["name"] = "changed"
    assert CALL["function"]["name"] == "f"
    assert check_messages([{"role": "assistant", "content": "x", "tool_calls": []}])[0] == {
        "role": "assistant",
        "content": "x",
    }
    assert check_tools(None) is None
    assert check_template_kwargs(None, ()) == {}


def test_the_switch_for_thinking_may_go_by_either_name() -> None:
    for name in ("thinking", "enable_thinking"):
        assert check_template_kwargs({name: False}, {"thinking"}) == {"thinking": False}
        assert check_template_kwargs({name: False}, {"enable_thinking"}) == {"enable_thinking": False}
        with pytest.raises(InvalidRequestError, match="does not read it; it reads none"):
            check_template_kwargs({name: False}, {"messages"})


def test_reasoning_goes_by_either_name() -> None:
    message = {"role": "assistant", "content": ""}
    assert check_messages([{**message, "reasoning": "hm"}]) == [{**message, "reasoning_content": "hm"}]
    assert check_messages([{"role": "assistant", "reasoning": "hm"}]) == [{**message, "reasoning_content": "hm"}]
    both = {**message, "reasoning": "no", "reasoning_content": "hm"}
    assert check_messages([both]) == [{**message, "reasoning_content": "hm"}]


def test_a_tool_is_declared_alike_strict_or_not() -> None:
    function = {"name": "f"}
    for strict in (True, False, None):
        tools = [{"type": "function", "function": {**function, "strict": strict}}]
        assert check_tools(tools) == [{"type": "function", "function": function}]
        assert tools[0]["function"]["strict"] is strict
