"""A stream is chunks, exactly one of which ends the reply, or an error; then [DONE], whatever happens."""

import asyncio
import json
import re
from types import SimpleNamespace

import pytest

from kimi_client import Chunk, KimiClientError, RequestCancelled, ServerFailed, TokenLogprob
from kimi_client.aio import AsyncStream
from kimi_client.replies.declared_tools import DeclaredTools
from kimi_client.replies.reader import ReplyReader
from kimi_openai.chat_replies import ChatWriter
from kimi_openai.event_stream import EventStream, UsageMode
from kimi_openai.generation import Generation
from kimi_openai.replies import CompletionWriter, Envelope
from kimi_openai.server_fields import ServerRequest
from support.openai_endpoint import read_events
from support.reply_texts import place_controls

STATISTICS = {"num_prompt_tokens": 3, "num_output_tokens": 2, "num_cached_tokens": 1, "seed": 7}
END = {"finish_reason": "stop", "statistics": STATISTICS}
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)


TOOLS = DeclaredTools([{"type": "function", "function": {"name": "f"}}], [])


def chat_writer(*, tools=False, logprobs=False):
    def make_reader(begins_thinking):
        return ReplyReader(TOOLS if tools else None, begins_thinking=begins_thinking)

    return ChatWriter(make_reader, with_logprobs=logprobs, with_token_ids=False)


def completion_writer(*, logprobs=False, ids=False):
    return CompletionWriter(num_logprobs=5 if logprobs else None, with_token_ids=ids)


class ScriptedClient:
    """Answers request i with the i-th list of chunks. An exception in place of a chunk is raised there."""

    def __init__(self, *scripts):
        self._scripts, self.streams = list(scripts), []

    def stream(self, *, stream, **fields):
        self.streams.append(ScriptedStream(self._scripts[len(self.streams)], fields))
        return self.streams[-1]


class ScriptedStream(AsyncStream):
    is_cancelled = False

    def __init__(self, script, fields):
        super().__init__("r", lambda again: None)
        self._script, self.fields = script, fields

    async def __aiter__(self):
        for chunk in self._script:
            await asyncio.sleep(0)
            if isinstance(chunk, Exception):
                raise chunk
            self.chunks.append(chunk)
            yield chunk

    def cancel(self):
        self.is_cancelled = True


async def leave_never():
    await asyncio.sleep(60)


ENVELOPE = Envelope(reply_id="x", model="kimi", created=1)


async def answered(client, make_writer, prompts, n, usage_mode):
    request = SimpleNamespace(receive=leave_never)
    generation = Generation(client, prompts, n, is_streamed=True)
    response = await generation.answer_streamed(request, make_writer, ENVELOPE, usage_mode)
    return "".join([event async for event in response.body_iterator])


PROMPT = ServerRequest({}, {})


def events(chunks, writer, *, usage_mode=UsageMode.NONE):
    """The JSON of each event."""
    client = ScriptedClient(chunks)
    return read_events(asyncio.run(answered(client, lambda: writer, [PROMPT], 1, usage_mode)).encode())


def several(*scripts, n, prompts=(PROMPT,), usage_mode=UsageMode.NONE):
    """(events, requests) of several choices."""
    client = ScriptedClient(*scripts)
    found = read_events(asyncio.run(answered(client, completion_writer, prompts, n, usage_mode)).encode())
    return found, client.streams


def reasons(found):
    return [choice["finish_reason"] for event in found for choice in event.get("choices", ())]


@pytest.mark.parametrize("writer", [chat_writer, completion_writer])
def test_one_chunk_says_why_it_ended_and_has_the_statistics(writer):
    found = events([Chunk("a", 1), Chunk("", 1), Chunk("b", 1, **END)], writer())
    assert reasons(found) == [None] * (len(found) - 1) + ["stop"]
    assert found[-1]["statistics"] == STATISTICS
    assert all("statistics" not in event and "usage" not in event for event in found[:-1])
    assert len({json.dumps([event["id"], event["created"], event["model"], event["object"]]) for event in found}) == 1


@pytest.mark.parametrize("writer", [chat_writer, completion_writer])
def test_usage_comes_in_a_chunk_of_its_own(writer):
    *found, last = events([Chunk("a", 1), Chunk("b", 1, **END)], writer(), usage_mode=UsageMode.AT_THE_END)
    assert all(event["usage"] is None for event in found)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


FAILURES = [
    (RequestCancelled("the server is shutting down"), "service_unavailable_error", "shutting down"),
    (ServerFailed("oops"), "server_error", "oops"),
    (KimiClientError("?"), "server_error", "?"),
    (ZeroDivisionError("secret"), "server_error", "internal error"),
    (Chunk("", 0, finish_reason="cancelled", stop_reason="the deadline"), "timeout_error", "the deadline"),
    (None, "server_error", "ended before"),
]


@pytest.mark.parametrize("writer", [chat_writer, completion_writer])
@pytest.mark.parametrize(("failure", "kind", "message"), FAILURES)
def test_a_failure_is_the_last_event(writer, failure, kind, message):
    *found, last = events(
        [Chunk("a", 1), *([] if failure is None else [failure])], writer(), usage_mode=UsageMode.AT_THE_END
    )
    assert set(last) == {"error"}
    assert last["error"]["type"] == kind
    assert message in last["error"]["message"]
    assert "secret" not in last["error"]["message"]
    assert set(reasons(found)) == {None}


def test_what_came_with_a_deadline_is_sent():
    chunks = [Chunk("a", 1), Chunk("b", 1, finish_reason="cancelled", statistics=STATISTICS)]
    *found, last = events(chunks, completion_writer())
    assert [event["choices"][0]["text"] for event in found] == ["a", "b"]
    assert "error" in last


def test_a_chat_begins_with_the_role():
    first, second, last = events([Chunk("hé", 1, **END)], chat_writer())
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert second["choices"][0]["delta"] == {"content": "hé"}
    assert last["choices"][0]["delta"] == {}


def test_thoughts_and_calls_have_their_own_deltas():
    text, offsets = place_controls(f"why</think>so{CALL}")
    chunks = [Chunk("", 0, begins_thinking=True, control_offsets=offsets), *(Chunk(c, 1) for c in text)]
    found = events([*chunks, Chunk("", 0, **END)], chat_writer(tools=True))
    deltas = [event["choices"][0]["delta"] for event in found[1:]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why"
    assert "".join(delta.get("content", "") for delta in deltas) == "so"
    first, *more = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert first == {
        "index": 0,
        "id": "functions.f:0",
        "type": "function",
        "function": {"name": "f", "arguments": "{"},
    }
    assert more == [{"index": 0, "function": {"arguments": "}"}}]
    assert reasons(found)[-1] == "tool_calls"


def test_a_call_and_a_full_length_is_length():
    text, offsets = place_controls(CALL + "and")
    chunks = [Chunk(text, 9, finish_reason="length", statistics=STATISTICS, control_offsets=offsets)]
    assert reasons(events(chunks, chat_writer(tools=True)))[-1] == "length"


def test_line_breaks_of_unicode_break_no_event():
    text = "a\u2028b\x85c\x0bd\x1ce\r\nf\n\ng🙂"
    _, second, _ = events([Chunk(text, 1, **END)], chat_writer())
    assert second["choices"][0]["delta"]["content"] == text


ENTRIES = (
    TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5)), "é", ("é", "b")),
    TokenLogprob(7, -3.0, ((6, -1.0),), "\ufffd", ("\ufffd",)),
)


def test_logprobs_of_a_chat():
    found = events(
        [Chunk("", 1, logprobs=ENTRIES[:1]), Chunk("x", 1, logprobs=ENTRIES[1:], **END)], chat_writer(logprobs=True)
    )
    first, second = [event["choices"][0]["logprobs"]["content"] for event in found if event["choices"][0]["logprobs"]]
    assert first == [
        {
            "token": "é",
            "logprob": -0.5,
            "bytes": [0xC3, 0xA9],
            "top_logprobs": [
                {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]},
                {"token": "b", "logprob": -1.5, "bytes": [98]},
            ],
        }
    ]
    assert second[0]["bytes"] is None


def test_logprobs_have_the_channel_of_their_text():
    """They have it also behind a call inside thoughts, where it is not known before the end, or a think token, says
    so."""
    for end, channel in (("", "content"), ("</think>", "reasoning_content")):
        tokens = ["hm", *re.split("(<[|].*?[|]>)", CALL), " so", *([end] if end else [])]
        _, offsets = place_controls("".join(tokens))
        head = Chunk("", 0, begins_thinking=True, control_offsets=offsets)
        chunks = [Chunk(token, 1, logprobs=(TokenLogprob(1, -1.0, token=token),)) for token in filter(None, tokens)]
        found = events([head, *chunks, Chunk("", 0, **END)], chat_writer(tools=True, logprobs=True))
        pieces = [event["choices"][0]["logprobs"] for event in found if event["choices"][0]["logprobs"]]
        named = {name: [] for name in ("reasoning_content", "content", "tool_calls")}
        for piece in pieces:
            for name, entries in piece.items():
                named.get(name, []).extend(entry["token"] for entry in entries or ())
        assert "".join(named["tool_calls"]) == CALL
        assert named[channel][-1 - bool(end)] == " so"
        assert sum(map(len, named.values())) == len(chunks)


def test_a_tokens_channel_waits_for_its_text():
    """A stop string may hold text back that its token's log-probability does not wait for."""
    tokens, texts = ["hm", "</think>", " so"], ["", "", "hm"]
    chunks = [
        Chunk(text, 1, logprobs=(TokenLogprob(1, -1.0, token=token),), begins_thinking=True, control_offsets=offsets)
        for token, text, offsets in zip(tokens, texts, [(), (2,), ()], strict=True)
    ]
    found = events([*chunks, Chunk("</think> so", 0, **END)], chat_writer(logprobs=True))
    pieces = [event["choices"][0]["logprobs"] or {} for event in found]
    named = {
        name: [entry["token"] for piece in pieces for entry in piece.get(name, ())]
        for name in ("reasoning_content", "content")
    }
    assert named == {"reasoning_content": ["hm", "</think>"], "content": [" so"]}


def test_logprobs_of_a_completion_go_on_counting():
    chunks = [
        Chunk("é", 1, logprobs=ENTRIES[:1], token_ids=(5,)),
        Chunk("x", 1, logprobs=ENTRIES[1:], token_ids=(7,), **END),
    ]
    found = events(chunks, completion_writer(logprobs=True, ids=True))
    first, second = [event["choices"][0] for event in found]
    assert first["logprobs"] == {
        "tokens": ["é"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"b": -1.5, "é": -0.5}],
        "text_offset": [0],
    }
    assert second["logprobs"]["text_offset"] == [1]
    assert second["logprobs"]["top_logprobs"] == [{"\ufffd": -1.0}]
    assert [first["token_ids"], second["token_ids"]] == [[5], [7]]


def test_of_two_tokens_that_look_alike_the_likelier_stays():
    entry = TokenLogprob(9, -4.0, ((6, -1.0), (7, -2.0), (8, -3.0)), "x", ("\ufffd", "\ufffd", "y"))
    (event,) = events([Chunk("x", 1, logprobs=(entry,), **END)], completion_writer(logprobs=True))
    (top,) = event["choices"][0]["logprobs"]["top_logprobs"]
    assert list(top.items()) == [("\ufffd", -1.0), ("y", -3.0), ("x", -4.0)]


def script(text, **end):
    return [*(Chunk(letter, 1) for letter in text), Chunk("", 0, finish_reason="stop", statistics=STATISTICS, **end)]


def test_choices_have_an_index_and_an_end_each():
    prompts = [
        ServerRequest({"seed": 2**64 - 1, "text_input": name}, {}, f"prompt[{i}]") for i, name in enumerate("pq")
    ]
    scripts = [script(text) for text in ("abc", "d", "efghi", "")]
    *found, last = several(*scripts, n=2, prompts=prompts, usage_mode=UsageMode.AT_THE_END)[0]
    texts, ends = [""] * 4, [[] for _ in scripts]
    for event in found:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]].append(choice["finish_reason"])
    assert texts == ["abc", "d", "efghi", ""]
    assert all(reasons == [None] * (len(reasons) - 1) + ["stop"] for reasons in ends)
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (6, 8), "a prompt counts once"
    asked = several(*scripts, n=2, prompts=prompts)[1]
    drawn = [(stream.fields["text_input"], stream.fields["seed"]) for stream in asked]
    assert drawn == [("p", 2**64 - 1), ("p", 0), ("q", 2**64 - 1), ("q", 0)]


def test_one_that_fails_ends_all_and_is_named():
    prompts = [ServerRequest({}, {}, f"prompt[{i}]") for i in range(3)]
    endless = [Chunk("a", 1)] * 1000
    found, _ = several(endless, [Chunk("b", 1), ServerFailed("oops")], endless, n=1, prompts=prompts)
    assert found[-1]["error"]["message"] == "prompt[1]: oops"
    assert len(found) < 20


def test_usage_may_come_with_every_chunk():
    head = Chunk("a", 1, num_prompt_tokens=3)
    *found, last = events([head, Chunk("b", 1, **END)], completion_writer(), usage_mode=UsageMode.CONTINUOUS)
    assert [event["usage"]["total_tokens"] for event in (*found, last)] == [4, 5, 5]
    assert found[0]["usage"]["prompt_tokens"] == 3


def test_a_client_that_leaves_before_the_first_event_ends_the_request():
    """The events are then never asked for, so that nothing in them can do it."""

    class Stream:
        is_cancelled = False

        def cancel(self):
            self.is_cancelled = True

    async def events_of_nobody():
        yield ""

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        await asyncio.sleep(60)

    stream = Stream()
    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    asyncio.run(EventStream(stream, events_of_nobody(), {})(scope, receive, send))
    assert stream.is_cancelled


def test_read_events_notices_a_stream_that_is_not_whole():
    for data in (b"", b"data: {}\n\n", b"data: [DONE]\n\ndata: [DONE]\n\n", b"data: {}\n\ndata: [DONE]"):
        with pytest.raises((AssertionError, ValueError), match=re.compile(".*", re.DOTALL)):
            read_events(data)
