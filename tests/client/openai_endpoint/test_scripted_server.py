"""Tool calls and thoughts as OpenAI's own client reads them, from a server that says what it is told."""

import openai
import pytest

from kimi_client import Chunk
from kimi_client.aio import AsyncStream
from kimi_openai import EndpointSettings
from support.openai_endpoint import running_endpoint

STATISTICS = {"num_prompt_tokens": 3, "num_output_tokens": 2, "num_cached_tokens": 1}
TEXT = (
    "I look it up.</think>One moment.<|tool_calls_section_begin|>"
    '<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{"q": "ü🙂"}<|tool_call_end|>'
    "<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("find", "add")]
ASK = {"model": "kimi", "messages": [{"role": "user", "content": "?"}]}
CALLS = [("functions.find:0", "find", '{"q": "ü🙂"}'), ("functions.add:1", "add", "{}")]


class ScriptedStream(AsyncStream):
    def __init__(self, pieces):
        super().__init__("r1", None)
        self._pieces = pieces

    async def __aiter__(self):
        for index, piece in enumerate(self._pieces, 1):
            end = {"finish_reason": "stop", "statistics": STATISTICS} if index == len(self._pieces) else {}
            self.chunks.append(Chunk(piece, 1, **end))
            yield self.chunks[-1]

    def cancel(self):
        self._is_open = False


class ScriptedClient:
    """In place of the gRPC client."""

    def __init__(self, url):
        self.asked = None

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    def stream(self, *, stream, **fields):
        pieces = [TEXT[i : i + 7] for i in range(0, len(TEXT), 7)] if stream else [TEXT]
        return ScriptedStream(pieces)


@pytest.fixture(params=[True, False], ids=["splits", "whole text"])
def splits(request):
    return request.param


@pytest.fixture
def client(monkeypatch, splits):
    monkeypatch.setattr("kimi_openai.app.AsyncKimiClient", ScriptedClient)
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


def test_a_request_that_does_not_think_has_no_reasoning(client, splits):
    (choice,) = client.chat.completions.create(**ASK, extra_body={"chat_template_kwargs": {"thinking": False}}).choices
    assert choice.message.content == TEXT
    assert not hasattr(choice.message, "reasoning_content")
