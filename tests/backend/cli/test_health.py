"""`kimi health` against scripted servers: what it calls healthy, and what it names when not."""

import contextlib
import inspect
import io
import json
import urllib.error
from email.message import Message
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kimi_backend.cli import health as health_module
from kimi_backend.cli.health import QUEUE_IS_FULL, Health, check_health, expects_draft, http_post
from kimi_backend.cli.main import app
from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine

SPECULATION = {"num_spec_steps": 1}


def server(*, not_ready=(), silent=(), status=200, body=None, speculation=SPECULATION, num_tokens=4):
    """A scripted one; keeps what it was asked."""
    asked = []

    def post(path, fields):
        asked.append((path, fields))
        if path in silent:
            raise ConnectionRefusedError("refused")
        if path in not_ready:
            return 400, ""
        if fields is None:
            return 200, ""
        statistics = json.dumps({"speculative_decoding": speculation, "is_draft_there": speculation is not None})
        return status, body or json.dumps({"num_output_tokens": num_tokens, "statistics": statistics})

    post.asked = asked
    return post


def test_all_three_models_and_a_generation_are_asked():
    post = server()
    health = check_health(post, with_draft=True)
    assert health.problem is None
    assert health.speculates
    paths = [path for path, _ in post.asked]
    assert paths == [
        "health/live",
        "health/ready",
        "models/kimi_target/ready",
        "models/eagle3_draft/ready",
        "models/spec_ensemble/ready",
        "models/spec_ensemble/generate",
    ]
    assert post.asked[-1][1]["num_speculative_tokens"] == 1


def test_a_draft_that_is_hardly_ever_accepted_is_a_warning():
    statistics = {"speculative_decoding": SPECULATION, "is_draft_there": True, "acceptance_problem": "near chance"}
    health = check_health(server(body=reply_with(statistics)), with_draft=True)
    assert (health.problem, health.speculates, health.warning) == (None, True, "near chance")


def reply_with(statistics):
    return json.dumps({"num_output_tokens": 4, "statistics": json.dumps(statistics)})


def test_without_a_draft_none_is_asked_for():
    post = server(speculation=None)
    assert check_health(post, with_draft=False).problem is None
    assert not any("eagle3_draft" in path for path, _ in post.asked)
    assert "num_speculative_tokens" not in post.asked[-1][1]


@pytest.mark.parametrize(
    ("post", "named"),
    [
        (server(silent=("health/live",)), "health/live: no answer"),
        (server(not_ready=("health/ready",)), "health/ready: HTTP 400"),
        (server(not_ready=("models/kimi_target/ready",)), "models/kimi_target/ready"),
        (server(not_ready=("models/eagle3_draft/ready",)), "models/eagle3_draft/ready"),
        (server(silent=("models/spec_ensemble/generate",)), "generate: no answer"),
        (server(status=503, body='{"error": "runner kimi_target: dead"}'), "HTTP 503: runner kimi_target: dead"),
        (server(status=500, body="<html>"), "HTTP 500: <html>"),
        (server(num_tokens=2), "2 tokens came, 4 were asked for"),
        (server(speculation=None), "without the draft"),
    ],
)
def test_what_is_wrong_is_named(post, named):
    health = check_health(post, with_draft=True)
    assert health.problem is not None
    assert named in health.problem


def test_a_full_queue_is_busy_and_not_ill():
    body = json.dumps({"error": f"5 {QUEUE_IS_FULL}, at most 5 may; try later"})
    health = check_health(server(status=503, body=body), with_draft=True)
    assert health.problem is None
    assert health.is_busy
    assert QUEUE_IS_FULL in inspect.getsource(Engine.submit), "the engine words it so"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"checkpoint": "/t", "draft": "/d"}, True),
        ({"checkpoint": "/t"}, False),
        ({}, True),
        ({"checkpoint": "/t", "draft": "/d", "max_speculative_tokens": 0}, False),
    ],
)
def test_the_environment_says_whether_there_is_a_draft(settings, expected):
    assert expects_draft(ServingSettings(**settings)) is expected


@pytest.mark.parametrize(
    ("health", "code", "out", "err"),
    [
        (Health(None), 0, "healthy: it generates\n", ""),
        (Health(None, speculates=True), 0, "healthy: it generates, with speculation\n", ""),
        (Health(None, is_busy=True), 0, "healthy: ready, its queue is full\n", ""),
        (Health(None, warning="near chance"), 0, "healthy: it generates\n", "warning: near chance\n"),
        (Health("no answer"), 1, "", "unhealthy: no answer\n"),
    ],
)
def test_the_command_says_what_was_found(monkeypatch, health, code, out, err):
    asked = []
    monkeypatch.setattr(
        health_module, "check_health", lambda post, with_draft: asked.append((post, with_draft)) or health
    )
    monkeypatch.setattr(health_module, "http_post", lambda url, timeout_s: (url, timeout_s))
    for name in ("CHECKPOINT", "DRAFT"):
        monkeypatch.delenv(f"KIMI_{name}", raising=False)
    done = CliRunner().invoke(app, ["health", "--url=host:1", "--timeout=2"])
    assert (done.exit_code, done.stdout, done.stderr) == (code, out, err)
    CliRunner().invoke(app, ["health", "--no-draft"])
    assert asked == [(("host:1", 2.0), True), (("localhost:8000", 15.0), False)]


def test_a_request_over_http_has_its_status_and_its_body(monkeypatch):
    asked = []

    def urlopen(request, timeout):
        asked.append((request.full_url, request.data, timeout))
        if request.data is not None:
            raise urllib.error.HTTPError(request.full_url, 503, "", Message(), io.BytesIO(b"full\xff"))
        return contextlib.closing(SimpleNamespace(status=200, read=lambda: b"ready", close=lambda: None))

    monkeypatch.setattr(health_module.urllib.request, "urlopen", urlopen)
    post = http_post("host:1", 2.0)
    assert post("health/live", None) == (200, "ready")
    assert post("models/x/generate", {"a": 1}) == (503, "full\ufffd")
    assert asked == [
        ("http://host:1/v2/health/live", None, 2.0),
        ("http://host:1/v2/models/x/generate", b'{"a": 1}', 2.0),
    ]
