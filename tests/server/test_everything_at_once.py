"""Everything that a request may ask for, in one: a grammar or a forced call, penalties, filters, scores, guesses of the
draft and of the text, their origins, stop texts, a budget of thoughts, a stream. The reply is the same for every k and
on every way to the server."""

import json
import urllib.request
from types import SimpleNamespace

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import openai

from kimi_client import KimiClient
from kimi_openai import EndpointSettings
from support.openai_endpoint import running_endpoint
from support.server_process import running_server, serving_settings
from support.waiting import PATIENCE_S

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kinds": {"type": "array", "items": {"enum": ["alpha", "alphabet"]}, "minItems": 3, "maxItems": 5},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kinds", "size"],
}
FUNCTION = {"name": "find", "parameters": SCHEMA, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "stop-it"}}]
FORMS = {
    "a forced call": {"tool_choice": {"type": "function", "function": {"name": "find"}}},
    "a form beside a strict tool": {
        "tools": TOOLS[:1],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
}
STOPS = {"one that never is whole": ['"alpha"!', '"size": x'], "one that cuts": ['"kinds": [']}
ASKED = {
    "messages": [{"role": "user", "content": "Once more: alpha, alphabet, alpha, alphabet."}],
    "tools": TOOLS,
    "parallel_tool_calls": False,
    "seed": 11,
    "temperature": 1.0,
    "max_tokens": 300,
    "top_p": 0.95,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.1,
    "logit_bias": {"300": -4},
}
ASKED_BEYOND_OPENAI = {
    "top_k": 2000,
    "min_p": 0.0001,
    "repetition_penalty": 1.05,
    "bad_words": ["Zürich"],
    "thinking_token_budget": 9,
    "priority": 1,
    "cache_salt": "mine",
    "timeout_s": PATIENCE_S,
    "return_token_ids": True,
    "return_token_origins": True,
    "proposer": "lookup+eagle3",
}
NUM_LOGPROBS = 2
AS_JSON = ("messages", "tools", "tool_choice", "response_format", "logit_bias")
"""Fields that are texts of JSON over HTTP."""


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    settings = serving_settings(checkpoint, proposer="lookup+eagle3", lookup_min_match=1)
    with running_server(settings, tmp_path_factory.mktemp("everything")) as running:
        yield running


@pytest.fixture(scope="module")
def direct(server):
    with KimiClient(f"localhost:{server.ports.grpc}") as connected:
        yield connected


@pytest.fixture(scope="module")
def client(server):
    with (
        running_endpoint(EndpointSettings(url=f"localhost:{server.ports.grpc}")) as running,
        openai.OpenAI(base_url=running.base_url, api_key="any", max_retries=0) as connected,
    ):
        yield connected


@pytest.mark.parametrize(("form", "stop"), list(zip(FORMS, reversed(STOPS), strict=True)))
def test_the_reply_is_the_same_for_every_k_on_every_way(server, direct, client, form, stop):
    asked = {**ASKED, **FORMS[form], "stop": STOPS[stop]}
    plain, guessed = (over_grpc(direct, asked, k) for k in (0, 3))
    is_cut = stop == "one that cuts"
    assert (plain.finish_reason, plain.stop_reason) == ("stop", STOPS[stop][0] if is_cut else plain.token_ids[-1])
    assert (set(plain.token_origins), set(guessed.token_origins) > {0}) == ({0}, True)
    assert set(guessed.statistics["speculation_by_proposer"]) == {"lookup", "eagle3"}
    for reply in (guessed, over_http(server, asked, 0), over_http(server, asked, 3)):
        assert contents(reply) == contents(plain)
    thoughts, text = plain.text.split("</think>")
    written = text[text.index("{") : None if is_cut else text.rindex("}") + 1]
    if not is_cut:
        check(json.loads(written))
    for k in (0, 3):
        seen = over_openai(client, asked, k)
        assert seen["token_ids"] == list(plain.token_ids)
        assert seen["logprobs"] == pytest.approx([each.logprob for each in plain.logprobs], abs=2e-5)
        assert (seen["reasoning_content"], seen["content"] + seen["arguments"]) == (thoughts, written)
        assert sum(length for _, length in seen["origins"]) == len(seen["reasoning_content"] + seen["content"])
        assert k or {origin for origin, _ in seen["origins"]} == {0}


def check(value):
    assert list(value) == list(SCHEMA["properties"])
    assert len(value["name"]) <= 6
    assert 3 <= len(value["kinds"]) <= 5
    assert set(value["kinds"]) <= {"alpha", "alphabet"}
    assert 0 <= value["size"] <= 99


def contents(reply):
    """The part of a reply that depends neither on k nor on the protocol."""
    scores = [(each.token_id, round(each.logprob, 4), [token for token, _ in each.top]) for each in reply.logprobs]
    return (
        reply.text,
        reply.finish_reason,
        str(reply.stop_reason),
        tuple(reply.token_ids),
        scores,
        tuple(reply.token_offsets),
    )


def over_grpc(direct, asked, k):
    with direct.stream(**asked, **ASKED_BEYOND_OPENAI, logprobs=NUM_LOGPROBS, num_speculative_tokens=k) as stream:
        reply = stream.result()
    assert len(stream.chunks) > 3
    return reply


def over_http(server, asked, k):
    """The generate extension, streamed; it writes a list of one element as that element."""
    fields = {**asked, **ASKED_BEYOND_OPENAI, "logprobs": NUM_LOGPROBS, "num_speculative_tokens": k, "stream": True}
    body = json.dumps({name: json.dumps(value) if name in AS_JSON else value for name, value in fields.items()})
    address = f"http://localhost:{server.ports.http}/v2/models/spec_ensemble/generate_stream"
    with urllib.request.urlopen(urllib.request.Request(address, body.encode()), timeout=PATIENCE_S) as reply:
        events = [json.loads(line.removeprefix(b"data: ")) for line in reply if line.startswith(b"data: ")]
    scores = [each for event in events for each in json.loads(event["logprobs"] or "[]")]
    return SimpleNamespace(
        text="".join(event["text_output"] for event in events),
        finish_reason=events[-1]["finish_reason"],
        stop_reason=events[-1]["stop_reason"],
        token_ids=[token_id for event in events for token_id in listed(event, "output_ids")],
        token_offsets=[offset for event in events for offset in listed(event, "token_offsets")],
        logprobs=[
            SimpleNamespace(
                token_id=each["token_id"], logprob=each["logprob"], top=[(top["token_id"], 0.0) for top in each["top"]]
            )
            for each in scores
        ],
    )


def listed(event, name):
    value = event.get(name, [])
    return value if isinstance(value, list) else [value]


def over_openai(client, asked, k):
    """The endpoint's stream, each part of the message put together."""
    extra = {**ASKED_BEYOND_OPENAI, "num_speculative_tokens": k}
    seen = {"token_ids": [], "logprobs": [], "reasoning_content": "", "content": "", "arguments": "", "origins": []}
    chunks = client.chat.completions.create(
        model="kimi", **asked, logprobs=True, top_logprobs=NUM_LOGPROBS, stream=True, extra_body=extra
    )
    for chunk in chunks:
        (choice,) = chunk.choices
        seen["content"] += choice.delta.content or ""
        seen["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            seen["arguments"] += call.function.arguments or ""
        seen["token_ids"] += getattr(choice, "token_ids", None) or []
        for runs in (getattr(choice, "text_origins", None) or {}).values():
            seen["origins"] += runs
        parts = choice.logprobs.model_dump() if choice.logprobs else {}
        # A chunk may hold the end of the thoughts and the first of the content, which the library names first.
        for name in sorted(parts, key="content".__eq__):
            seen["logprobs"] += [each["logprob"] for each in parts[name] or []]
        seen["finish_reason"] = choice.finish_reason
    return seen
