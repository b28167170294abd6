"""The endpoint has more than OpenAI's: its description, tokens of texts, usage of every chunk, pages elsewhere,
fields that nobody knows."""

import json
import re
from typing import ClassVar

import pytest
from jsonschema import Draft202012Validator

from kimi_client import Chunk, Completion, InvalidRequest
from kimi_client.aio import AsyncStream
from kimi_openai import EndpointSettings
from kimi_openai.api_keys import ApiKey
from kimi_openai.request_fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kimi_openai.routes import ROUTES
from support.openai_endpoint import read_events, running_endpoint

PAGE = "https://app.example"
STATISTICS = {"num_prompt_tokens": 3, "num_output_tokens": 2, "num_cached_tokens": 0}


class ScriptedStream(AsyncStream):
    async def __aiter__(self):
        for piece, more in (
            ("a", {"num_prompt_tokens": 3}),
            ("b", {"finish_reason": "stop", "statistics": STATISTICS}),
        ):
            self.chunks.append(Chunk(piece, 1, **more))
            yield self.chunks[-1]

    def cancel(self):
        self._is_open = False


class ScriptedClient:
    """A stand-in for the gRPC client: it counts the letters of a text and knows three tokens."""

    asked: ClassVar[list] = []

    def __init__(self, url):
        pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    def stream(self, *, stream, **fields):
        self.asked.append(fields)
        return ScriptedStream("r1", lambda again: None)

    async def generate(self, **fields):
        self.asked.append(fields)
        if any(token_id > 2 for token_id in fields.get("input_ids") or ()):
            raise InvalidRequest("prompt: token id 3 given, 0 to 2 is allowed")
        text = "".join("xyz"[token_id] for token_id in fields.get("input_ids") or ())
        token_ids = tuple(range(len(fields.get("text_input") or "four")))
        return Completion(text, "length", None, 0, (), (), STATISTICS, prompt_token_ids=token_ids)


@pytest.fixture(scope="module")
def endpoint():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kimi_openai.app.AsyncKimiClient", ScriptedClient)
        settings = EndpointSettings(
            api_keys=(ApiKey.of("one", "sk-1"),), cors_origins=(PAGE,), refuses_unknown_fields=False
        )
        with running_endpoint(settings) as running:
            yield running


def post(endpoint, path, body, **headers):
    status, _, data = endpoint.send("POST", path, body, {"Authorization": "Bearer sk-1", **headers})
    return status, data


def test_its_description_has_every_url_and_field(endpoint):
    status, _, data = endpoint.send("GET", "/openapi.json")
    document = json.loads(data)
    assert (status, document["openapi"]) == (200, "3.1.0")
    assert {(m.upper(), path) for path, of in document["paths"].items() for m in of} == {
        (route.method, route.path) for route in ROUTES
    }
    schemas = document["components"]["schemas"]
    for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        assert schemas[kind.__name__]["properties"].keys() == kind.model_fields.keys()
        Draft202012Validator.check_schema(schemas[kind.__name__])
    for reference in re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)):
        assert reference in schemas
    for route in ROUTES:
        operation = document["paths"][route.path][route.method.lower()]
        assert operation.get("security") == ([{}, {"key": []}] if route.needs_key else None)
        assert ("requestBody" in operation) == (route.body is not None)
        assert ("parameters" in operation) == ("{name}" in route.path)
        assert ("text/event-stream" in operation["responses"]["200"]["content"]) == route.may_stream
        assert operation["responses"].keys() >= {"200", "400", "401", "503"}


@pytest.mark.parametrize(
    ("prompt", "is_allowed"),
    [
        *(
            ("a", True),
            ([1, 2], True),
            (["a", "b"], True),
            ([[1], [2]], True),
            ([1], True),
            (["a"], True),
            ([[1]], True),
        ),
        *(([], False), ([-1], False), ([[]], False), ({}, False)),
    ],
)
def test_its_description_of_a_prompt_is_what_it_takes(endpoint, prompt, is_allowed):
    schema = json.loads(endpoint.send("GET", "/openapi.json")[2])["components"]["schemas"]["CompletionRequest"]
    assert Draft202012Validator(schema["properties"]["prompt"]).is_valid(prompt) == is_allowed
    assert post(endpoint, "/v1/completions", {"prompt": prompt})[0] == (200 if is_allowed else 400)


def test_tokens_of_a_text_and_of_a_chat_and_back(endpoint):
    assert post(endpoint, "/tokenize", {"prompt": "abc", "add_special_tokens": False}) == (
        200,
        b'{"count":3,"tokens":[0,1,2]}',
    )
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}
    assert json.loads(post(endpoint, "/tokenize", chat)[1])["count"] == 4
    asked = ScriptedClient.asked[-1]
    assert (asked["messages"], asked["tools"], asked["max_tokens"]) == (chat["messages"], chat["tools"], 0)
    assert post(endpoint, "/detokenize", {"tokens": [2, 0]}) == (200, b'{"prompt":"zx"}')


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/tokenize", {}, "prompt", "one of them"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt", "one of them"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools", "goes with messages"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs", "goes with messages"),
        ("/tokenize", {"prompt": 3}, "prompt", "3 given"),
        ("/detokenize", {}, "tokens", "missing"),
        ("/detokenize", {"tokens": []}, "tokens", "at least 1"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "-1 given"),
        ("/detokenize", {"tokens": [3]}, "tokens", "token id 3 given"),
    ],
)
def test_what_has_no_tokens_is_refused_by_its_field(endpoint, path, body, param, message):
    status, data = post(endpoint, path, body)
    error = json.loads(data)["error"]
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("options", "totals"),
    [
        ({"continuous_usage_stats": True}, [4, 5, 5]),
        ({"continuous_usage_stats": True, "include_usage": True}, [4, 5, 5]),
        ({"include_usage": True}, [None, None, 5]),
        ({"continuous_usage_stats": False}, [None, None]),
    ],
)
def test_usage_of_every_chunk(endpoint, options, totals):
    body = {"prompt": "a", "stream": True, "stream_options": options}
    found = read_events(post(endpoint, "/v1/completions", body)[1])
    assert [(event.get("usage") or {}).get("total_tokens") for event in found] == totals


def test_a_page_elsewhere_may_ask_and_no_other(endpoint):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    status, headers, _ = endpoint.send("OPTIONS", "/v1/completions", headers={"Origin": PAGE, **asks})
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert "POST" in headers["access-control-allow-methods"]
    status, headers, _ = endpoint.send("GET", "/openapi.json", headers={"Origin": PAGE})
    assert headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in headers["access-control-expose-headers"].lower()
    status, headers, _ = endpoint.send("OPTIONS", "/v1/completions", headers={"Origin": "https://evil.example", **asks})
    assert (status, headers.get("access-control-allow-origin")) == (403, None)


def test_a_field_that_nobody_knows_may_be_left_out_and_one_that_is_not_served_may_not(endpoint):
    assert post(endpoint, "/v1/completions", {"prompt": "a", "tempratur": 3})[0] == 200
    assert "tempratur" not in ScriptedClient.asked[-1]
    status, data = post(endpoint, "/v1/completions", {"prompt": "a", "best_of": 3})
    assert (status, json.loads(data)["error"]["param"]) == (400, "best_of")
    with running_endpoint(EndpointSettings(url="localhost:1")) as strict:
        status, _, data = strict.send("POST", "/v1/completions", {"prompt": "a", "tempratur": 3})
        assert (status, json.loads(data)["error"]["param"]) == (400, "tempratur")
