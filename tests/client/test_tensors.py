"""Fields become the server's tensors and its tensors chunks; errors follow the server's status."""

import json

import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc")

import kimi_client
from kimi_backend.serving.request_fields import OUTPUT_FIELDS
from kimi_client import _tensors
from kimi_client._errors import from_message, from_status
from kimi_client._retries import retry_pauses
from kimi_client._transport import deadline
from kimi_client.aio import AsyncKimiClient


def test_chunks_are_read_from_the_servers_outputs():
    asked = []

    class Result:
        def as_numpy(self, name):
            asked.append(name)

    assert _tensors.parse_chunk(Result()) == kimi_client.Chunk(text="", num_tokens=0)
    assert set(asked) == {f.name for f in OUTPUT_FIELDS}


def test_public_names_exist():
    assert sorted(kimi_client.__all__) == kimi_client.__all__
    assert all(hasattr(kimi_client, name) for name in kimi_client.__all__)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"text_input": "héllo"}, [1, 1]),
        ({"stop": ["a", "b"]}, [1, 2]),
        ({"input_ids": (1, 2, 3)}, [1, 3]),
        ({"seed": 2**64 - 1}, [1, 1]),
        ({"messages": [{"role": "user", "content": "x"}]}, [1, 1]),
    ],
)
def test_values_become_batched_tensors(fields, shape):
    (tensor,) = _tensors.build_inputs({**fields, "top_k": None})
    assert list(tensor.array.shape) == shape


@pytest.mark.parametrize("bias", [{5: 1.5}, {"5": 1.5}, {np.int64(5): 1.5}, '{"5": 1.5}'])
def test_logit_bias_is_a_json_object_of_token_ids(bias):
    (tensor,) = _tensors.build_inputs({"logit_bias": bias})
    assert json.loads(tensor.array.item()) == {"5": 1.5}


@pytest.mark.parametrize(
    "fields",
    [
        {"temprature": 1.0},
        {"logit_bias": {5.5: 1.0}},
        {"max_tokens": "many"},
        {"seed": -1},
        {"max_tokens": 2**40},
        {"text_input": "\ud800"},
        {"stop": ["a", "\udcff"]},
        {"messages": [object()]},
    ],
)
def test_bad_fields_name_themselves(fields):
    (name,) = fields
    with pytest.raises(kimi_client.InvalidRequest, match=name):
        _tensors.build_inputs(fields)


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        ("INVALID_ARGUMENT", "top_p: 2 given", kimi_client.InvalidRequest),
        ("UNAVAILABLE", "queue is full", kimi_client.ServerBusy),
        ("UNAVAILABLE", "failed to connect to all addresses", kimi_client.ServerUnreachable),
        ("CANCELLED", "Locally cancelled", kimi_client.RequestCancelled),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", kimi_client.RequestTimedOut),
        ("INTERNAL", "internal error", kimi_client.ServerFailed),
        ("", "no status", kimi_client.ServerFailed),
    ],
)
def test_status_decides_the_class(status, message, error):
    assert type(from_status(status, message)) is error


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("INVALID_ARG: top_p: 2 given", kimi_client.InvalidRequest, "top_p: 2 given"),
        ("UNAVAILABLE: queue is full", kimi_client.ServerBusy, "queue is full"),
        ("CANCELLED: shutting down", kimi_client.RequestCancelled, "shutting down"),
        ("INTERNAL: oops", kimi_client.ServerFailed, "oops"),
        ("Request for unknown model: 'x' has no versions", kimi_client.ServerBusy, "unknown model"),
        ("something else: no code", kimi_client.ServerFailed, "something else"),
    ],
)
def test_a_messages_code_decides_the_class(text, error, message):
    found = from_message(text)
    assert type(found) is error
    assert message in str(found)


@pytest.mark.parametrize("client", [kimi_client.KimiClient, AsyncKimiClient])
def test_an_address_with_a_scheme_is_refused(client):
    with pytest.raises(kimi_client.InvalidRequest, match="url: 'http://localhost:8001' given, host:port"):
        client("http://localhost:8001")


def test_nothing_listening_is_unreachable():
    client = kimi_client.KimiClient("127.0.0.1:9", timeout_s=2)
    assert client.is_ready() is False
    with pytest.raises(kimi_client.ServerUnreachable):
        client.generate(text_input="x", max_tokens=1)


@pytest.mark.parametrize(
    ("timeout_s", "expected"), [(None, None), (2.0, 7.0), (9e9, 31_622_400.0), (3e38, 31_622_400.0)]
)
def test_a_timeout_of_centuries_is_none_that_has_passed(timeout_s, expected):
    """gRPC's nanoseconds overflow from 9.2e9 seconds on."""
    assert deadline(timeout_s) == expected


TOPS = [{"token_id": 5, "token": "a", "logprob": -0.5}, {"token_id": 6, "token": "b", "logprob": -1.5}]
ENTRY = {"token_id": 5, "token": "a", "logprob": -0.5, "top": TOPS}


def parsed(**texts):
    class Result:
        def as_numpy(self, name):
            return np.array([[texts[name]]], dtype=np.object_) if name in texts else None

    return _tensors.parse_chunk(Result())


def test_log_probabilities_have_their_tokens():
    chunk = parsed(logprobs=json.dumps([ENTRY]).encode(), prompt_logprobs=json.dumps([ENTRY | {"rank": 1}]).encode())
    tokens = {"token": "a", "top": ((5, -0.5), (6, -1.5)), "top_tokens": ("a", "b")}
    assert chunk.logprobs == (kimi_client.TokenLogprob(5, -0.5, **tokens),)
    assert chunk.prompt_logprobs == (kimi_client.PromptLogprob(5, -0.5, 1, **tokens),)


def test_a_token_that_ended_a_reply_is_its_reason():
    assert parsed(statistics=b'{"stop_token_id": 0}', stop_reason=b"0").stop_reason == 0
    assert parsed(statistics=b'{"stop_token_id": null}', stop_reason=b"end").stop_reason == "end"
    assert parsed(statistics=b"", stop_reason=b"", finish_reason=b"").stop_reason is None


def test_a_number_of_retries_below_zero_is_refused():
    with pytest.raises(kimi_client.InvalidRequest, match="max_retries: -1 given, at least 0 is allowed"):
        retry_pauses(-1)


def test_a_protocol_that_there_is_not_is_refused():
    with pytest.raises(kimi_client.InvalidRequest, match="protocol: 'rest' given, one of grpc, http is allowed"):
        kimi_client.KimiClient(protocol="rest")


def test_pauses_between_retries_grow_to_a_limit(monkeypatch):
    monkeypatch.setattr("kimi_client._retries.random.uniform", lambda low, high: (low + high) / 1.5)
    assert [round(pause, 6) for pause in retry_pauses(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
