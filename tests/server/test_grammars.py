"""Replies of a given form, through the real server: its own protocol, its HTTP one, and OpenAI's API."""

import json
import urllib.error
import urllib.request

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import openai

from kimi_client import InvalidRequest, KimiClient
from kimi_openai import EndpointSettings
from support.openai_endpoint import running_endpoint
from support.waiting import PATIENCE_S

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kinds": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
    },
    "required": ["name", "size", "kinds"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop-it"}},
]
MESSAGES = [{"role": "user", "content": "A thing, please."}]
ASK = {"seed": 3, "temperature": 1.0, "max_tokens": 200}


@pytest.fixture(scope="module")
def direct(url):
    with KimiClient(url) as connected:
        yield connected


@pytest.fixture(scope="module")
def client(url):
    with (
        running_endpoint(EndpointSettings(url=url)) as running,
        openai.OpenAI(base_url=running.base_url, api_key="any", max_retries=0) as connected,
    ):
        yield connected


def check(value):
    assert value.keys() == SCHEMA["properties"].keys()
    assert len(value["name"]) <= 6
    assert 0 <= value["size"] <= 99
    assert set(value["kinds"]) <= {"a", "bc"}


def test_a_schema_at_any_k(direct):
    replies = [
        direct.generate(text_input="once", response_format=FORMAT, num_speculative_tokens=k, **ASK) for k in (0, 1, 3)
    ]
    assert len({reply.text for reply in replies}) == 1
    assert replies[0].finish_reason == "stop"
    check(json.loads(replies[0].text))
    assert replies[2].speculation["num_accepted_draft_tokens"] > 5, "what is forced is guessed without the draft"


def test_it_begins_behind_the_thoughts(direct):
    reply = direct.generate(messages=MESSAGES, response_format=FORMAT, thinking_token_budget=5, **ASK)
    thoughts, text = reply.text.split("</think>")
    check(json.loads(text))
    assert thoughts


@pytest.mark.parametrize(
    ("structure", "texts"),
    [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "(ab){2}"}, {"abab"}),
        ({"grammar": 'root ::= "x"'}, {"x"}),
    ],
    ids=["choice", "regex", "grammar"],
)
def test_structured_outputs(direct, structure, texts):
    reply = direct.generate(text_input="once", structured_outputs=structure, **ASK)
    assert (reply.finish_reason, reply.text in texts) == ("stop", True)


def test_over_http(server):
    body = {"text_input": "once", "max_tokens": 20, "structured_outputs": json.dumps({"choice": ["left"]})}
    address = f"http://localhost:{server.ports.http}/v2/models/spec_ensemble/generate"
    with urllib.request.urlopen(
        urllib.request.Request(address, json.dumps(body).encode()), timeout=PATIENCE_S
    ) as reply:
        assert json.loads(reply.read())["text_output"] == "left"
    body["structured_outputs"] = json.dumps({"regex": "(a"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode()), timeout=PATIENCE_S)
    assert b"structured_outputs: Regex parsing error" in caught.value.read()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format: "),
        (
            {"structured_outputs": {"json": {"type": "array", "items": {"not": {}}}}},
            "structured_outputs.json.items.not: ",
        ),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs: Regex parsing error at position 3"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos: true given"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs: 300013 bytes given"),
    ],
)
def test_what_cannot_be_is_refused(direct, fields, message):
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        direct.generate(text_input="once", **ASK, **fields)


def test_a_strict_tool_is_taken(client):
    strict = [{"type": "function", "function": {"name": "find", "parameters": SCHEMA, "strict": True}}]
    ask = {
        "model": "kimi",
        "messages": MESSAGES,
        "tools": strict,
        "tool_choice": "required",
        "max_tokens": 300,
        "seed": 4,
    }
    reply = client.chat.completions.create(**ask, parallel_tool_calls=False, extra_body={"thinking_token_budget": 3})
    check(json.loads(reply.choices[0].message.tool_calls[0].function.arguments))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_forced_calls(client, choice):
    ask = {"model": "kimi", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 300, "seed": 4}
    extra = {"thinking_token_budget": 3}
    reply = client.chat.completions.create(**ask, parallel_tool_calls=False, extra_body=extra)
    (call,) = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls"
    assert not reply.choices[0].message.content
    assert call.id == f"functions.{call.function.name}:0"
    if call.function.name == "find":
        check(json.loads(call.function.arguments))
    else:
        assert (choice, call.function.arguments) == ("required", "{}")


def test_a_wrong_schema_is_a_400_that_names_its_place(client):
    wrong = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "if": {}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="kimi", messages=MESSAGES, response_format=wrong)
    assert caught.value.body["param"] == "response_format.json_schema.schema.if"
