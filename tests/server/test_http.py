"""The generate extension, as curl would use it."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from support.waiting import PATIENCE_S

LISTENING = "0A"


@pytest.fixture
def post(server):
    def send(path, body, timeout_s=PATIENCE_S):
        address = f"http://127.0.0.1:{server.ports.http}/v2/models/spec_ensemble/{path}"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(address, data=data, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return send


def events(body):
    return [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: ")]


def test_generate_gives_one_response(post):
    status, body = post("generate", {"text_input": "hi", "parameters": {"max_tokens": 5, "seed": 4}})
    reply = json.loads(body)
    assert status == 200
    assert reply["num_output_tokens"] == 5
    assert reply["finish_reason"] == "length"
    assert json.loads(reply["statistics"])["seed"] == 4


def test_generate_stream_adds_up_to_generate(post):
    fields = {"text_input": "hi", "max_tokens": 12, "seed": 4}
    _, whole = post("generate", fields)
    status, body = post("generate_stream", {**fields, "stream": True})
    pieces = events(body)
    assert status == 200
    assert len(pieces) > 1
    assert "".join(p["text_output"] for p in pieces) == json.loads(whole)["text_output"]
    assert [p["finish_reason"] for p in pieces] == [""] * (len(pieces) - 1) + ["length"]


def test_lists_and_nested_parameters(post):
    body = {"text_input": "hi", "stop": ["zzzz", "yyyy"], "sampling_parameters": '{"max_tokens": 3}', "id": "mine"}
    status, reply = post("generate", body)
    assert status == 200, reply
    assert json.loads(reply)["id"] == "mine"


def test_errors_have_a_status_and_a_message(post):
    status, body = post("generate", {"text_input": "hi", "temperature": -1.0})
    assert status == 400
    assert "temperature" in json.loads(body)["error"]
    status, body = post("generate", {"text_input": "hi", "no_such_field": 1})
    assert status == 400
    assert "no_such_field" in json.loads(body)["error"]
    status, _ = post("generate", b"{")
    assert status in (400, 500), "the server's own answer to malformed JSON"


NO_UTF_8 = (b'"zz": "\xff"', b'"z\xff": 1', b'"id": "\xff"', b'"cache_salt": "\xff"', b'"stop": ["\xff"]')


@pytest.mark.parametrize("field", NO_UTF_8)
def test_bytes_that_are_no_utf_8_are_a_wrong_request(post, field):
    status, body = post("generate", b'{"text_input": "hi", "max_tokens": 3, %s}' % field)
    assert status == 400
    assert "not valid UTF-8" in json.loads(body)["error"]


def test_a_request_may_be_called_anything(post):
    for name in (b"", b"#1", "é".encode(), b"\\u0000"):
        assert post("generate", b'{"text_input": "hi", "max_tokens": 3, "id": "%s"}' % name)[0] == 200


def test_nothing_listens_on_a_network(server):
    """The embedded server has known holes."""
    ports = {server.ports.http, server.ports.grpc, server.ports.metrics}
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.rsplit(":", 1)
            if state == LISTENING and int(port, 16) in ports:
                found[int(port, 16)] = address[-8:]  # the rest says that it is an IPv4 address in IPv6
    assert found == dict.fromkeys(ports, "0100007F"), "127.0.0.1, least significant byte first"
