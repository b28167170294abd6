"""The OpenAI endpoint before the real server, judged by OpenAI's own client and by ours."""

import asyncio
import contextlib
import itertools
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import openai
from openai.types.chat import ChatCompletionMessage

from kimi_client import KimiClient
from kimi_openai import EndpointSettings
from support.openai_endpoint import read_events, running_endpoint
from support.server_process import MAX_MODEL_LEN, assert_everything_is_free, cut_short, wait_until_running

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße 🙂, was gibt's?"}]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
LONG = {"max_tokens": MAX_MODEL_LEN - 64, "ignore_eos": True, "seed": 1}
SHORT = {"max_tokens": 12, "seed": 5, "temperature": 0.8}


@pytest.fixture(scope="module")
def endpoint(url):
    """Replies as the server says them; the model of these tests thinks until its last token."""
    with running_endpoint(EndpointSettings(url=url, splits_thinking=False)) as running:
        yield running


@pytest.fixture(scope="module")
def splitting_client(url):
    with (
        running_endpoint(EndpointSettings(url=url)) as running,
        openai.OpenAI(base_url=running.base_url, api_key="any", max_retries=0) as connected,
    ):
        yield connected


@pytest.fixture(scope="module")
def client(endpoint):
    with openai.OpenAI(base_url=endpoint.base_url, api_key="any", max_retries=0) as connected:
        yield connected


@pytest.fixture(scope="module")
def direct(url):
    with KimiClient(url) as connected:
        yield connected


def test_it_is_healthy(endpoint):
    assert endpoint.send("GET", "/health")[0] == 200


def test_a_completion_is_what_the_server_says(client, direct):
    reply = client.completions.create(model="kimi", prompt="def add(", stop=["never"], logit_bias={"7": -5}, **SHORT)
    expected = direct.generate(text_input="def add(", stop=["never"], logit_bias={"7": -5}, **SHORT)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert reply.usage.prompt_tokens == expected.statistics["num_prompt_tokens"]
    assert reply.usage.completion_tokens == expected.num_output_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply.statistics["seed"] == SHORT["seed"]
    assert reply.statistics["speculative_decoding"] == expected.speculation


def test_token_ids_go_in_and_come_out(client):
    reply = client.completions.create(
        model="kimi", prompt=[5, 6, 7], **SHORT, extra_body={"return_token_ids": True, "min_tokens": 12}
    )
    assert reply.prompt_token_ids == [5, 6, 7]
    assert len(reply.choices[0].token_ids) == 12


def test_a_chat_is_what_the_server_says(client, direct):
    reply = client.chat.completions.create(model="kimi", messages=MESSAGES, tools=TOOLS, **SHORT)
    expected = direct.generate(messages=MESSAGES, tools=TOOLS, **SHORT)
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].message.role == "assistant"
    assert reply.usage.prompt_tokens == expected.statistics["num_prompt_tokens"]
    without = client.chat.completions.create(model="kimi", messages=MESSAGES, tools=TOOLS, tool_choice="none", **SHORT)
    assert without.usage.prompt_tokens < reply.usage.prompt_tokens


def test_a_streamed_chat_is_the_whole_one(client):
    ask = {"model": "kimi", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **SHORT}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    *body, last = chunks
    choices = [chunk.choices[0] for chunk in body]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [whole.choices[0].finish_reason]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert entries == whole.choices[0].logprobs.content
    assert len(entries) == SHORT["max_tokens"]
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert not last.choices
    assert last.usage == whole.usage


def test_a_streamed_completion_is_the_whole_one(client):
    ask = {"model": "kimi", "prompt": "once", "logprobs": 3, **SHORT}
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [entry for piece in logprobs for entry in getattr(piece, name)]
        assert joined == getattr(whole.choices[0].logprobs, name), name
    assert all(len(top) in (3, 4) for top in whole.choices[0].logprobs.top_logprobs)


def test_each_text_says_who_said_it_first(client, direct):
    ask = {**SHORT, "max_tokens": 40, "ignore_eos": True}
    expected = direct.generate(text_input="def add(", return_token_origins=True, **ask)
    assert len(expected.token_origins) == len(expected.token_offsets) == 40
    assert expected.token_origins[0] == 0
    guessed, accepted = sum(expected.token_origins), expected.speculation["num_accepted_draft_tokens"]
    assert accepted - 3 < guessed <= accepted, "what the last round guessed beyond max_tokens is no part of the text"
    assert list(expected.token_offsets) == sorted(expected.token_offsets)
    extra = {"return_token_origins": True, "ignore_eos": True}
    reply = client.completions.create(
        model="kimi", prompt="def add(", **{**SHORT, "max_tokens": 40}, extra_body=extra, stream=True
    )
    runs, text = [], ""
    for chunk in reply:
        runs, text = runs + chunk.choices[0].text_origins["text"], text + chunk.choices[0].text
    assert text == expected.text
    assert sum(length for _, length in runs) == len(text)


def test_logprobs_are_the_servers(client, direct):
    reply = client.chat.completions.create(model="kimi", messages=MESSAGES, logprobs=True, top_logprobs=1, **SHORT)
    expected = direct.generate(messages=MESSAGES, logprobs=1, **SHORT).logprobs
    found = [(e.token, e.logprob, e.top_logprobs[0].token) for e in reply.choices[0].logprobs.content]
    assert found == [(e.token, e.logprob, e.top_tokens[0]) for e in expected]


def test_why_a_reply_ended(client):
    free = client.completions.create(
        model="kimi", prompt="once", max_tokens=40, seed=3, extra_body={"ignore_eos": True}
    )
    assert free.choices[0].finish_reason == "length"
    stop = free.choices[0].text[10:14]
    cut = client.completions.create(
        model="kimi", prompt="once", max_tokens=40, seed=3, stop=stop, extra_body={"ignore_eos": True}
    )
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].stop_reason == stop
    assert free.choices[0].text.startswith(cut.choices[0].text + stop)
    assert len(client.completions.create(model="kimi", prompt="once", seed=3).choices[0].text) <= len(
        free.choices[0].text
    )


BAD = [
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": [10**6]}, "prompt"),
    ("completions", {"prompt": "a " * 5000}, "prompt"),
    ("completions", {"prompt": "a", "top_p": 7}, "top_p"),
    ("completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ("completions", {"prompt": "a", "temperature": -1}, "temperature"),
    ("completions", {"prompt": "a", "logprobs": 10**6}, "logprobs"),
    ("completions", {"prompt": "a", "num_speculative_tokens": 8}, "num_speculative_tokens"),
    ("completions", {"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
    ("completions", {"prompt": "a", "stop": [""]}, "stop"),
    ("completions", {"prompt": "a", "timeout_s": 0}, "timeout_s"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [3]}, "messages[0]"),
    ("chat/completions", {"messages": [{"role": "x", "content": "y"}]}, "messages[0].role"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": "a " * 5000}]}, "messages"),
    ("chat/completions", {"messages": MESSAGES, "tools": [3]}, "tools[0].type"),
    ("chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ("chat/completions", {"messages": MESSAGES, "max_completion_tokens": -1}, "max_completion_tokens"),
    (
        "chat/completions",
        {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}},
        "chat_template_kwargs.messages",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=[f"{b[0]}-{b[2]}" for b in BAD])
def test_a_bad_request_is_told_which_field(endpoint, path, body, param, stream):
    status, reply = endpoint.post(f"/v1/{path}", {**body, "stream": stream})
    assert status == 400, reply
    error = reply["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)
    for sign in ("Traceback", 'File "', "INVALID_ARG", "text_input", "input_ids"):
        assert sign not in error["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_prompt_that_is_too_long_has_its_own_code(endpoint, path):
    prompt = {"prompt": [5] * 1000, "messages": [{"role": "user", "content": "a " * 1000}]}
    name = "messages" if "chat" in path else "prompt"
    _, reply = endpoint.post(f"/v1/{path}", {name: prompt[name]})
    assert reply["error"]["code"] == "context_length_exceeded"


def test_a_deadline_is_an_error(endpoint, client, server, slow_steps):
    ask = {"prompt": "tell", "timeout_s": 0.4, **LONG}
    status, headers, body = endpoint.send("POST", "/v1/completions", ask)
    assert (status, json.loads(body)["error"]["code"]) == (408, "timeout")
    assert headers["x-should-retry"] == "false", "OpenAI's clients repeat a request that gets 408 otherwise"
    for timeout_s in itertools.accumulate(itertools.repeat(1.5)):  # until it was long enough for a first token
        status, _, body = endpoint.send("POST", "/v1/completions", {**ask, "stream": True, "timeout_s": timeout_s})
        *chunks, last = read_events(body)
        assert status == 200
        assert last["error"]["type"] == "timeout_error"
        if "".join(chunk["choices"][0]["text"] for chunk in chunks):
            break
    with pytest.raises(openai.APIError, match="deadline"):
        list(client.completions.create(model="kimi", prompt="tell", stream=True, extra_body={"timeout_s": 0.2, **LONG}))
    assert_everything_is_free(server)


@pytest.mark.parametrize("when", ["at once", "before the whole reply", "within the stream"])
def test_a_client_that_leaves_ends_its_requests(endpoint, server, slow_steps, when):
    connections = []
    is_streamed = when != "before the whole reply"
    with cut_short(server, 8 * LONG["max_tokens"]):
        for index in range(8):
            connection = endpoint.connect()
            body = json.dumps({"prompt": f"tell {index}", "stream": is_streamed, **LONG})
            connection.request("POST", "/v1/completions", body)
            connections.append(connection)
        if when == "within the stream":
            for connection in connections:
                assert connection.getresponse().read(32)
        elif when == "before the whole reply":
            wait_until_running(server, 1)
        for connection in connections:
            connection.close()
    assert endpoint.send("GET", "/health")[0] == 200


def test_leaving_openais_client_ends_the_request(client, server, slow_steps):
    ask = {"max_tokens": LONG["max_tokens"], "extra_body": {"ignore_eos": True}}
    with (
        cut_short(server, LONG["max_tokens"]),
        client.chat.completions.create(model="kimi", messages=MESSAGES, stream=True, **ask) as stream,
    ):
        next(iter(stream))


def test_32_streams_at_once_say_what_each_says_alone(endpoint, direct):
    async def one(connected, index):
        stream = await connected.completions.create(
            model="kimi", prompt=f"stream {index}", max_tokens=20, seed=index, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="any", max_retries=0) as connected:
            return await asyncio.gather(*(one(connected, index) for index in range(32)))

    texts = asyncio.run(all_of_them())
    for index in (0, 13, 31):
        assert texts[index] == direct.generate(text_input=f"stream {index}", max_tokens=20, seed=index).text
    assert len(set(texts)) > 16


THINKING_OFF = (
    {"thinking": {"type": "disabled"}},
    {"enable_thinking": False},
    {"reasoning_effort": "none"},
    *({"chat_template_kwargs": {"thinking": value}} for value in (False, 0, None, "", [])),
)


def test_the_rendered_prompt_decides_what_is_thought(splitting_client):
    ask = {"model": "kimi", "messages": MESSAGES, **SHORT}
    message = splitting_client.chat.completions.create(**ask).choices[0].message
    assert (message.content, bool(message.reasoning_content)) == ("", True)
    for more in THINKING_OFF:
        message = splitting_client.chat.completions.create(**ask, extra_body=more).choices[0].message
        assert message.content, more
        assert not hasattr(message, "reasoning_content"), more


def test_thoughts_end_with_their_budget_whatever_is_drafted(splitting_client):
    ask = {"model": "kimi", "messages": MESSAGES, "logprobs": True, **SHORT}
    found = set()
    for k in (0, 3, 7):
        more = {"thinking_token_budget": 5, "num_speculative_tokens": k, "ignore_eos": True}
        choice = splitting_client.chat.completions.create(**ask, extra_body=more).choices[0]
        assert [entry["token"] for entry in choice.logprobs.reasoning_content][5:] == ["</think>"]
        assert len(choice.logprobs.content) == SHORT["max_tokens"] - 6
        found.add((choice.message.reasoning_content, choice.message.content))
    assert len(found) == 1


def test_an_argument_that_the_template_does_not_read_is_refused(splitting_client):
    with pytest.raises(openai.BadRequestError, match="is thinking meant") as caught:
        splitting_client.chat.completions.create(
            model="kimi", messages=MESSAGES, extra_body={"chat_template_kwargs": {"thinkin": False}}
        )
    assert caught.value.param == "chat_template_kwargs.thinkin"


def test_a_message_is_continued(client, direct):
    begun = {"role": "assistant", "content": "Well, "}
    reply = client.chat.completions.create(
        model="kimi",
        messages=[*MESSAGES, {**begun, "partial": True}],
        extra_body={"return_token_ids": True},
        **SHORT,
    )
    whole = direct.generate(messages=[*MESSAGES, begun], max_tokens=1, return_token_ids=True).prompt_token_ids
    shared = len(reply.prompt_token_ids)
    assert tuple(reply.prompt_token_ids) == whole[:shared]
    assert len(whole) > shared + 4, "the end of the turn, and the beginning of the next"


SMALL_THINGS = [
    {"seed": -1},
    {"stream_options": {"include_usage": None}, "stream": True},
    {"extra_body": {"repetition_penalty": 0.01}},
    {"parallel_tool_calls": False, "tools": TOOLS},
]


@pytest.mark.parametrize("more", SMALL_THINGS, ids=lambda more: next(iter(more)))
def test_small_things_are_taken(client, more):
    reply = client.chat.completions.create(model="kimi", messages=MESSAGES, max_tokens=2, **more)
    if "stream" in more:
        list(reply)


def test_a_token_that_ended_the_reply_is_a_number(client):
    ask = {"model": "kimi", "prompt": "once", "max_tokens": 4, "seed": 3}
    ids = (
        client.completions.create(**ask, extra_body={"return_token_ids": True, "ignore_eos": True}).choices[0].token_ids
    )
    choice = client.completions.create(**ask, extra_body={"stop_token_ids": [ids[1]]}).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", ids[1])


def test_a_value_is_quoted_as_it_was_sent(client):
    with pytest.raises(openai.BadRequestError, match=r"top_p: 1\.1 given"):
        client.completions.create(model="kimi", prompt="a", top_p=1.1)


def test_a_tools_markers_reach_the_endpoint_as_control_tokens(client, direct):
    """The server leaves them in the text and says where they are: with tools declared they are no content."""
    marker = "<|tool_call_begin|>"
    ids = direct.generate(messages=[*MESSAGES, TOOL_TURN, TOOL_RETURN], max_tokens=1, return_token_ids=True)
    found = [token_id for token_id in set(ids.prompt_token_ids) if _text_of(direct, token_id) == marker]
    assert found, "the template writes the marker"
    reply = client.chat.completions.create(
        model="kimi", messages=MESSAGES, tools=TOOLS, max_tokens=2, extra_body={"allowed_token_ids": found}
    )
    assert reply.choices[0].message.content == ""
    assert reply.choices[0].message.tool_calls is None
    reply = client.chat.completions.create(
        model="kimi", messages=MESSAGES, max_tokens=2, extra_body={"allowed_token_ids": found}
    )
    assert reply.choices[0].message.content == marker * 2


CALLS = [{"id": "functions.find:0", "type": "function", "function": {"name": "find", "arguments": "{}"}}]
TOOL_TURN = {"role": "assistant", "content": None, "tool_calls": CALLS}
TOOL_RETURN = {"role": "tool", "tool_call_id": "functions.find:0", "content": "nothing"}


def test_a_conversation_goes_on_with_what_came_back(client):
    """OpenAI's client gives messages back with fields that are null, and with those that it does not know."""
    first = client.chat.completions.create(model="kimi", messages=MESSAGES, tools=TOOLS, **SHORT).choices[0].message
    turn = ChatCompletionMessage.model_validate({**TOOL_TURN, "reasoning_content": "hm"}).model_dump()
    messages = [*MESSAGES, first.model_dump(), MESSAGES[1], turn, TOOL_RETURN]
    reply = client.chat.completions.create(model="kimi", messages=messages, tools=TOOLS, **SHORT)
    assert reply.choices[0].finish_reason == "length"
    again = client.chat.completions.create(
        model="kimi", messages=[*messages[:2], first, *messages[3:]], tools=TOOLS, **SHORT
    )
    assert again.choices[0].message.content == reply.choices[0].message.content


def test_the_documents_example_runs(endpoint, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/openai.md").read_text(), re.DOTALL)
    address = "http://localhost:9000/v1"
    assert address in code
    exec(compile(code.replace(address, endpoint.base_url), "docs/openai.md", "exec"), {})
    assert "num_accepted_draft_tokens" in capsys.readouterr().out


def _text_of(direct, token_id):
    with contextlib.suppress(Exception):
        return direct.generate(text_input="a", max_tokens=1, allowed_token_ids=[token_id]).text
