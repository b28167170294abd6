"""`kimi health` against scripted servers: what it calls healthy, and what it names when not."""

import inspect
import json

import pytest

from kimi_backend.cli.health import QUEUE_IS_FULL, check_health, expects_draft
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
