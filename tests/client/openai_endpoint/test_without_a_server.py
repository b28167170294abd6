"""The endpoint answers some things by itself: HTTP, keys, names, and that nobody is behind it."""

import inspect
import json
import os
import signal
import socket
import subprocess
import sys

import openai
import pytest

from kimi_backend.engine.engine import Engine
from kimi_client import InvalidRequest, RequestTimedOut, ServerBusy, ServerFailed, ServerUnreachable
from kimi_openai import EndpointSettings, open_socket
from kimi_openai.api_keys import ApiKey
from kimi_openai.connection_limits import ConnectionLimits
from kimi_openai.errors import QUEUE_IS_FULL, from_client_error
from support.openai_endpoint import running_endpoint
from support.waiting import PATIENCE_S

KEY = "k\u00e9y"
NAMES = ("kimi", "moonshotai/Kimi-K2.5")
NOBODY = "localhost:1"


@pytest.fixture(scope="module")
def endpoint():
    with running_endpoint(EndpointSettings(url=NOBODY, model_names=NAMES)) as running:
        yield running


@pytest.fixture(scope="module")
def locked():
    with running_endpoint(EndpointSettings(url=NOBODY, api_keys=(ApiKey.of("one", KEY),))) as running:
        yield running


def error_of(reply):
    status, _, body = reply
    return status, json.loads(body)["error"]


def test_models(endpoint):
    client = openai.OpenAI(base_url=endpoint.base_url, api_key="any")
    assert [model.id for model in client.models.list()] == list(NAMES)
    assert client.models.retrieve(NAMES[1]).id == NAMES[1]
    with pytest.raises(openai.NotFoundError, match="'kimi' or"):
        client.models.retrieve("gpt")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/chat", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_other_urls_and_methods(endpoint, method, path, status):
    found, error = error_of(endpoint.send(method, path))
    assert found == status
    assert path in error["message"]


def test_nobody_behind_it(endpoint):
    assert endpoint.send("GET", "/health")[0] == 503
    for more in ({}, {"stream": True}):
        reply = endpoint.send("POST", "/v1/completions", {"prompt": "a", **more})
        status, error = error_of(reply)
        assert (status, error["type"]) == (503, "service_unavailable_error")
        assert reply[1]["retry-after"] == "1"


def test_a_model_that_is_not_served(endpoint):
    status, error = error_of(endpoint.send("POST", "/v1/completions", {"prompt": "a", "model": "gpt"}))
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


def test_a_bad_field_names_itself(endpoint):
    client = openai.OpenAI(base_url=endpoint.base_url, api_key="any")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="kimi", prompt="a", n=17)
    assert caught.value.param == "n"
    assert caught.value.type == "invalid_request_error"


def test_a_key_is_asked_for_where_there_is_one(locked):
    ask = {"prompt": "a"}
    for given in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer k"}, {"Authorization": b"Basic k\xe9y"}):
        for method, path, body in (("GET", "/v1/models", None), ("POST", "/v1/completions", ask)):
            reply = locked.send(method, path, body, given)
            status, error = error_of(reply)
            assert (status, error["code"]) == (401, "invalid_api_key")
            assert reply[1]["www-authenticate"] == "Bearer"
    right = {"Authorization": f"Bearer {KEY}".encode()}
    assert locked.send("GET", "/v1/models", None, right)[0] == 200
    assert locked.send("GET", "/health")[0] == 503


def test_a_body_that_is_too_long(endpoint):
    connection = endpoint.connect()
    try:
        connection.request("POST", "/v1/completions", b"[" + b" " * ConnectionLimits().max_body_bytes)
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # answered before the whole body was sent
    finally:
        connection.close()


def test_a_client_that_leaves_within_its_body(endpoint):
    with socket.create_connection(("127.0.0.1", endpoint.port)) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert endpoint.send("GET", "/v1/models")[0] == 200


def test_what_is_no_http(endpoint):
    with socket.create_connection(("127.0.0.1", endpoint.port)) as raw:
        raw.sendall(b"\x00\xff\r\n\r\n")
        assert b"400" in raw.recv(4096)
    with socket.create_connection(("127.0.0.1", endpoint.port)) as raw:
        raw.sendall(b"GET /v1/mod els HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"400" in raw.recv(4096)


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (InvalidRequest("top_p: 7 given, up to 1 is allowed"), 400, "top_p", None),
        (InvalidRequest("messages[0].role is 3; allowed: user"), 400, "messages[0].role", None),
        (InvalidRequest("max_tokens: 0 given"), 400, "max_completion_tokens", None),
        (InvalidRequest("prompt: 9 tokens given, at most 8 are allowed"), 400, "messages", "context_length_exceeded"),
        (InvalidRequest("prompt: 9 or more tokens given, at most 8"), 400, "messages", "context_length_exceeded"),
        (InvalidRequest("Wrong from its first word"), 400, None, None),
        (ServerBusy(f"1024 {QUEUE_IS_FULL}, at most 1024 may; try later"), 429, None, None),
        (ServerBusy("runner kimi_target is loading"), 503, None, None),
        (ServerUnreachable("ipv4:10.0.0.7 refused"), 503, None, None),
        (RequestTimedOut("cancelled after 1 s"), 504, None, "timeout"),
        (ServerFailed("oops"), 500, None, None),
    ],
)
def test_errors_of_the_server(error, status, param, code):
    made = from_client_error(error, {"prompt": "messages", "max_tokens": "max_completion_tokens"})
    assert (made.status, made.param, made.code) == (status, param, code)
    assert param is None or str(made).startswith(param)
    assert "10.0.0.7" not in str(made)
    assert made.body()["error"]["message"] == str(made)


def test_a_full_queue_is_known_by_the_engines_words():
    assert QUEUE_IS_FULL in inspect.getsource(Engine.submit)


KIMI = [sys.executable, "-m", "kimi_backend.cli.main", "openai", f"--url={NOBODY}"]


def test_the_command_says_where_it_listens_and_ends_when_told():
    process = subprocess.Popen(
        [*KIMI, "--port=0", f"--url={NOBODY}", "--model-name=a", "--model-name=b"], stderr=subprocess.PIPE, text=True
    )
    line = process.stderr.readline()
    assert line.startswith("http://127.0.0.1:")
    assert "a, b" in line
    assert f"nobody answers at {NOBODY}" in process.stderr.readline()
    port = line.split("/v1")[0].rsplit(":", 1)[1]
    taken = subprocess.run([*KIMI, f"--port={port}"], capture_output=True, text=True, timeout=PATIENCE_S)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    process.stderr.close()
    assert taken.returncode == 2
    assert f"127.0.0.1:{port} cannot be taken" in taken.stderr
    assert "Traceback" not in taken.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url=http://localhost:8001"], "url: 'http://localhost:8001' given, host:port"),
        (["--model-name="], "model name: '' given"),
    ],
)
def test_the_command_refuses_what_cannot_work(options, message):
    done = subprocess.run([*KIMI, "--port=0", *options], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_it_imports_neither_torch_nor_the_engine():
    code = (
        "import sys, kimi_openai, kimi_backend.cli.main, kimi_backend.cli.openai_endpoint;"
        "assert not {'torch', 'triton', 'kimi_backend.engine', 'tokenizers', 'tiktoken', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ}, timeout=PATIENCE_S)


def test_small_writes_do_not_wait_for_one_another():
    """Each event of a stream is one; without the option a client gets them 40 ms late."""
    with (
        open_socket("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
