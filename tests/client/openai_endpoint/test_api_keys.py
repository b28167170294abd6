"""Keys from a file, their limits, and what is measured and logged of requests; nobody is behind the endpoint."""

import json
import logging

import pytest
from limits import parse
from prometheus_client import start_http_server

from kimi_openai import EndpointSettings
from kimi_openai.api_keys import ApiKey, BadKeys, KeyRing, read_keys
from kimi_openai.app import Endpoint
from kimi_openai.errors import ApiError
from kimi_openai.logs import set_up_logs
from kimi_openai.observing import ACCESS_LOGGER
from support.openai_endpoint import running_endpoint
from support.prometheus_text import scrape
from support.waiting import wait_for

KEYS = {"a": {"key": "sk-a", "rate": "2/minute"}, "b": {"key": "sk-b", "concurrency": 1}}
BODY = {"messages": [{"role": "user", "content": "hi"}]}
NOBODY = "localhost:1"


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(KEYS))
    return read_keys(file)


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_a_rate_ends_in_429_that_says_when_to_come_again(keys):
    with running_endpoint(EndpointSettings(url=NOBODY, api_keys=keys)) as endpoint:

        def post(key):
            status, headers, data = endpoint.send("POST", "/v1/chat/completions", BODY, bearer(key))
            return status, headers, json.loads(data)["error"]

        assert [post("sk-a")[0] for _ in range(2)] == [503, 503]  # nobody answers behind it
        status, headers, error = post("sk-a")
        assert (status, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert 1 <= int(headers["retry-after"]) <= 60
        assert [post("sk-b")[0] for _ in range(3)] == [503] * 3, "its one place is free again after each"
        assert post("sk-c")[0] == 401
        assert endpoint.send("GET", "/v1/models", headers=bearer("sk-a"))[0] == 200, "looking costs nothing"


def test_a_key_has_its_requests_at_once(keys):
    ring = KeyRing(keys)
    owner = ring.owner({"authorization": "Bearer sk-b"})
    with ring.running(owner):
        with pytest.raises(ApiError, match="1 requests of this key are running, 1 may") as caught:
            ring.running(owner).__enter__()
        assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "1"})
    with pytest.raises(ZeroDivisionError), ring.running(owner):
        raise ZeroDivisionError
    with ring.running(owner):
        pass


def test_each_choice_of_each_prompt_counts():
    ring = KeyRing((ApiKey.of("c", "sk-c", rate=parse("7/minute"), concurrency=4),))
    owner = ring.owner({"authorization": "Bearer sk-c"})
    with ring.running(owner) as first:
        first.grow(2)
        with ring.running(owner) as second:
            with pytest.raises(ApiError, match="3 requests of this key are running and 2 more are asked for") as caught:
                second.grow(3)
            assert caught.value.code == "concurrency_limit"
    with ring.running(owner) as third:  # the fourth that is sent
        with pytest.raises(ApiError, match="n: 5 choices of all prompts given, 4 may be asked of this key") as caught:
            third.grow(5)
        assert caught.value.status == 400
        third.grow(4)
    with pytest.raises(ApiError, match="7 per 1 minute") as caught, ring.running(owner):
        pass
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")


def test_the_endpoint_counts_choices_and_prompts(keys):
    ask = {"prompt": ["a", "b", "c"], "n": 4}
    with running_endpoint(EndpointSettings(url=NOBODY, api_keys=keys)) as endpoint:
        status, _, data = endpoint.send("POST", "/v1/completions", ask, bearer("sk-b"))
        assert (status, json.loads(data)["error"]["message"]) == (
            400,
            "n: 12 choices of all prompts given, 1 may be asked of this key",
        )
        assert endpoint.send("POST", "/v1/completions", {"prompt": "a", "n": 2}, bearer("sk-a"))[0] == 503
        assert endpoint.send("POST", "/v1/completions", {"prompt": "a"}, bearer("sk-a"))[0] == 429


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no", "not JSON"),
        ("{}", "an object of names"),
        ('{"a": {"key": ""}}', "a: key is needed"),
        ('{"a": {"key": "secret", "speed": 1}}', "an object with concurrency, key, rate"),
        ('{"a": {"key": "secret", "rate": "fast"}}', "'fast' given"),
        ('{"a": {"key": "secret", "concurrency": true}}', "True given, at least 1"),
        ('{"a": {"key": "secret"}, "b": {"key": "secret"}}', "two names have the same key"),
    ],
)
def test_a_wrong_file_is_told_without_its_keys(tmp_path, text, problem):
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(BadKeys, match=problem) as caught:
        read_keys(tmp_path / "keys.json")
    assert "secret" not in str(caught.value)


@pytest.fixture
def logged(capsys):
    access, root = logging.getLogger(ACCESS_LOGGER), logging.getLogger()
    before = access.handlers, access.propagate, access.level, root.handlers
    yield capsys
    access.handlers, access.propagate, root.handlers = before[0], before[1], before[3]
    access.setLevel(before[2])


@pytest.mark.parametrize("as_json", [True, False])
def test_a_request_is_logged_with_its_key_and_counted(keys, logged, as_json):
    set_up_logs(as_json=as_json, with_access=True)
    settings = EndpointSettings(url=NOBODY, api_keys=keys)
    own = Endpoint(settings)
    with running_endpoint(settings, own) as endpoint:
        endpoint.send("GET", "/v1/models", headers=bearer("sk-b"))
        endpoint.send("GET", "/openapi.json")
        endpoint.send("GET", "/v1/a-strangers-path")
        server, thread = start_http_server(0, "127.0.0.1", own.metrics.registry)
        last = 'kimi_openai_requests_total{path="other",status="404"} 1.0'
        wait_for(lambda: last in scrape(server.server_port))  # a request counts once its reply is sent
        text = scrape(server.server_port)
        server.shutdown()
        server.server_close()
        thread.join()
    lines = [line for line in logged.readouterr().err.splitlines() if "/v1/models" in line]
    assert len(lines) == 1
    if as_json:
        fields = json.loads(lines[0])
        assert (fields["status"], fields["key"], fields["client"]) == (200, "b", "127.0.0.1")
    else:
        assert "status=200" in lines[0]
        assert "key='b'" in lines[0]
    assert "sk-b" not in lines[0]
    assert 'kimi_openai_requests_total{path="/v1/models",status="200"} 1.0' in text
    assert 'kimi_openai_key_requests_total{key="b",status="200"} 1.0' in text
    assert last in text
    assert 'kimi_openai_requests_total{path="/openapi.json",status="200"} 1.0' in text
    assert "strangers" not in text
