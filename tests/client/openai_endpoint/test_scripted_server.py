"""Tool calls and thoughts as OpenAI's own client reads them, from a server that says what it is told."""

from typing import ClassVar

import openai
import pytest

from kimi_client import Chunk
from kimi_client.aio import AsyncStream
from kimi_openai import EndpointSettings
from support.openai_endpoint import running_endpoint
from support.reply_texts import TEXTS, place_controls
from support.reply_texts import TOOLS as MANY_TOOLS

STATISTICS = {"num_prompt_tokens": 3, "num_output_tokens": 2, "num_cached_tokens": 1}
TEXT = (
    "I look it up.</think>One moment.<|tool_calls_section_begin|>"
    '<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{"q": "ü🙂"}<|tool_call_end|>'
    "<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("find", "add")]
ASK = {"model": "kimi", "messages": [{"role": "user", "content": "?"}]}
CALLS = [("functions.find:0", "find", '{"q": "ü🙂"}'), ("functions.add:1", "add", "{}")]


class Script:
    """The script of what the server will say."""

    marked = TEXT
    begins_thinking = True
    finish_reason = "stop"
    asked: ClassVar[dict] = {}


class ScriptedStream(AsyncStream):
    def __init__(self, size):
        super().__init__("r1", lambda again: None)
        text, self._offsets = place_controls(Script.marked)
        self._pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]

    async def __aiter__(self):
        for index, piece in enumerate(self._pieces, 1):
            end = {"finish_reason": Script.finish_reason, "statistics": STATISTICS}
            head = {"begins_thinking": Script.begins_thinking, "control_offsets": self._offsets}
            is_last = index == len(self._pieces)
            self.chunks.append(Chunk(piece, 1, **(head if index == 1 else {}), **(end if is_last else {})))
            yield self.chunks[-1]

    def cancel(self):
        self._is_open = False


class ScriptedClient:
    """A stand-in for the gRPC client."""

    def __init__(self, url):
        self.asked = None

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    def stream(self, *, stream, **fields):
        Script.asked = fields
        return ScriptedStream(7 if stream else 10**9)


@pytest.fixture(params=[True, False], ids=["splits", "whole text"])
def splits(request):
    return request.param


@pytest.fixture
def client(monkeypatch, splits):
    monkeypatch.setattr("kimi_openai.app.AsyncKimiClient", ScriptedClient)
    for name in ("marked", "begins_thinking", "finish_reason"):
        monkeypatch.setattr(Script, name, getattr(Script, name))
    with (
        running_endpoint(EndpointSettings(splits_thinking=splits)) as endpoint,
        openai.OpenAI(base_url=endpoint.base_url, api_key="any", max_retries=0) as connected,
    ):
        yield connected


def expected(splits):
    reasoning = "I look it up."
    return (reasoning, "One moment.") if splits else (None, f"{reasoning}</think>One moment.")


def named(calls):
    return [(call.id, call.function.name, call.function.arguments) for call in calls]


def test_a_whole_reply(client, splits):
    (choice,) = client.chat.completions.create(**ASK, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert (getattr(choice.message, "reasoning_content", None), choice.message.content) == expected(splits)
    assert named(choice.message.tool_calls) == CALLS


def test_a_streamed_reply_as_openais_helper_joins_it(client, splits):
    with client.chat.completions.stream(**ASK, tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content == expected(splits)[1]
    assert named(final.message.tool_calls) == CALLS
    deltas = [event.chunk.choices[0].delta for event in events if event.type == "chunk"]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == (expected(splits)[0] or "")


def test_without_tools_no_call_is_read(client, splits):
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = client.chat.completions.create(**ASK, **more).choices
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert choice.message.content.endswith("<|tool_calls_section_end|>")


def test_a_prompt_that_ends_outside_of_a_think_block_has_no_reasoning(client, splits):
    """Whatever the request says: the server looks at the prompt."""
    Script.marked, Script.begins_thinking = "Hello", False
    (choice,) = client.chat.completions.create(**ASK, extra_body={"chat_template_kwargs": {"thinking": True}}).choices
    assert choice.message.content == "Hello"
    assert not hasattr(choice.message, "reasoning_content")


def joined(chunks):
    """(reasoning, content, calls with what the last chunk says of them) of a stream."""
    reasoning, content, calls, incomplete = "", "", [], []
    for chunk in chunks:
        (choice,) = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        incomplete += getattr(choice, "incomplete_tool_calls", ())
        for call in choice.delta.tool_calls or ():
            if call.index == len(calls):
                calls.append([call.id, call.function.name, ""])
            calls[call.index][2] += call.function.arguments
    cut = {entry["index"] for entry in incomplete}
    return reasoning, content, tuple((*call, index not in cut) for index, call in enumerate(calls))


@pytest.mark.parametrize("splits", [True], indirect=True, ids=[""])
def test_every_text_streamed_and_whole(client):
    for case in TEXTS:
        if not case.splits:
            continue
        Script.marked, Script.begins_thinking = case.marked, case.thinks
        ask = {
            **ASK,
            "messages": [*ASK["messages"], *case.messages],
            "tools": MANY_TOOLS,
            "parallel_tool_calls": not case.is_one_enough,
        }
        reasoning, content, calls = case.expected
        assert joined(client.chat.completions.create(**ask, stream=True)) == (reasoning, content, calls), case.name
        assert Script.asked.get("stop_control_tokens") == (["<|tool_call_end|>"] if case.is_one_enough else None)
        (choice,) = client.chat.completions.create(**ask).choices
        complete = [call[:3] for call in calls if call[3]]
        assert named(choice.message.tool_calls or ()) == complete, case.name
        assert (choice.message.content or "", getattr(choice.message, "reasoning_content", "")) == (content, reasoning)
        assert choice.finish_reason == ("tool_calls" if complete else "stop")
        cut = [(entry["id"], entry["name"]) for entry in getattr(choice, "incomplete_tool_calls", ())]
        assert cut == [call[:2] for call in calls if not call[3]]
