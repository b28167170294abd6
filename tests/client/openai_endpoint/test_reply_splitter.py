"""Reasoning, content and tool calls do not depend on how the text was cut; no text is lost."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_openai.reply_splitter import ReplySplitter, ToolCall, read_call

CALL = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
ADD, FIND = CALL.format("add", 0, '{"a": 1}'), CALL.format("find", 1, '{"q": "</think> ü"}')
SECTION = f"<|tool_calls_section_begin|>{ADD}{FIND}<|tool_calls_section_end|>"
ADD_CALL = ToolCall("functions.add:0", "add", '{"a": 1}')
FIND_CALL = ToolCall("functions.find:1", "find", '{"q": "</think> ü"}')


def split(pieces, *, thinks=True, tools=True):
    """(reasoning, content, calls) of all parts together."""
    splitter = ReplySplitter(begins_with_reasoning=thinks, reads_tool_calls=tools)
    parts = [splitter.feed(piece) for piece in pieces] + [splitter.feed("", is_last=True)]
    calls = tuple(call for part in parts for call in part.tool_calls)
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts), calls


CASES = [
    ("", "", "", ()),
    ("thought", "thought", "", ()),
    ("thought</think>answer", "thought", "answer", ()),
    ("<think>thought</think>answer", "thought", "answer", ()),
    ("</think>answer</think>", "", "answer</think>", ()),
    ("a</thin", "a</thin", "", ()),
    (f"why</think>so:{SECTION}", "why", "so:", (ADD_CALL, FIND_CALL)),
    (f"why{SECTION}bye", "why", "bye", (ADD_CALL, FIND_CALL)),
    (f"</think>{SECTION}{SECTION}", "", "", (ADD_CALL, FIND_CALL) * 2),
    # Not whole calls: the text stays.
    (
        "</think><|tool_calls_section_begin|><|tool_call_begin|>functions.add:0",
        "",
        "<|tool_call_begin|>functions.add:0",
        (),
    ),
    (f"</think><|tool_calls_section_begin|>{ADD}<|tool_call_beg", "", "<|tool_call_beg", (ADD_CALL,)),
    ("</think><|tool_calls_section_begin|>x<|tool_call_end|>", "", "x<|tool_call_end|>", ()),
    ("</think><|tool_calls_section_begin|>x<|tool_calls_section_end|>y", "", "xy", ()),
    ("</think>a <|tool_calls_section_", "", "a <|tool_calls_section_", ()),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
def test_a_whole_text(text, reasoning, content, calls):
    assert split([text]) == (reasoning, content, calls)


@pytest.mark.parametrize("text", [case[0] for case in CASES])
def test_character_by_character(text):
    assert split(text) == split([text])


TEXTS = st.lists(
    st.sampled_from(
        ["a", " ", "<", "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"]
    )
    | st.sampled_from(["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "f:0", "{}", ADD])
).map("".join)


@given(TEXTS, st.lists(st.integers(0, 300)), st.booleans(), st.booleans())
def test_any_cuts_give_the_same(text, cuts, thinks, tools):
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert split(pieces, thinks=thinks, tools=tools) == split([text], thinks=thinks, tools=tools)


@given(TEXTS)
def test_without_thoughts_and_tools_the_text_is_as_it_was(text):
    assert split([text], thinks=False, tools=False) == ("", text, ())


def test_content_waits_only_for_what_may_be_a_marker():
    splitter = ReplySplitter(begins_with_reasoning=False, reads_tool_calls=True)
    assert splitter.feed("a<|tool").content == "a"
    assert splitter.feed("box").content == "<|toolbox"
    assert splitter.feed("if a < b:").content == "if a < b:"


def test_a_call_is_given_out_when_it_is_whole():
    splitter = ReplySplitter(begins_with_reasoning=False, reads_tool_calls=True)
    assert splitter.feed("<|tool_calls_section_begin|>" + ADD).tool_calls == (ADD_CALL,)


@pytest.mark.parametrize(
    ("call_id", "name"), [("functions.add:0", "add"), ("add:12", "add"), ("add", "add"), ("functions.a.b:1", "a.b")]
)
def test_names(call_id, name):
    call = read_call(f"<|tool_call_begin|> {call_id} <|tool_call_argument_begin|> {{}} ")
    assert call == ToolCall(call_id, name, "{}")


def test_a_call_without_a_name_is_none():
    assert read_call("<|tool_call_begin|><|tool_call_argument_begin|>{}") is None
