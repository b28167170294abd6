"""Every request is counted once, with its status and its times, and written into the access log where that is on."""

import asyncio
import contextlib
import logging

import pytest
from prometheus_client import CollectorRegistry

from kimi_openai.generation import REQUEST_ID_HEADER
from kimi_openai.observing import ACCESS_LOGGER, KEY_NAME, OTHER_PATH, EndpointMetrics, Observed

START = {"type": "http.response.start", "status": 201, "headers": [(REQUEST_ID_HEADER.lower().encode(), b"r1")]}


class App:
    """Answers, unless its client leaves."""

    def __init__(self, *messages, fails=False):
        self.messages, self.fails, self.scopes = messages, fails, []

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope)
        for message in self.messages:
            await send(message)
        if self.fails:
            raise ConnectionError


def observed(app, **scope):
    """The metrics after one request, and what was sent."""
    metrics, sent = EndpointMetrics(), []

    async def send(message):
        sent.append(message)

    given = {"type": "http", "path": "/v1/models", "method": "GET", **scope}
    with contextlib.suppress(ConnectionError):
        asyncio.run(Observed(app, metrics)(given, None, send))
    return metrics.registry, sent


def value(registry: CollectorRegistry, name, **labels):
    return registry.get_sample_value(f"kimi_openai_{name}", labels)


def test_a_request_is_counted_with_its_status():
    registry, sent = observed(App(START), **{KEY_NAME: "team"})
    assert sent == [START]
    assert value(registry, "requests_total", path="/v1/models", status="201") == 1
    assert value(registry, "key_requests_total", key="team", status="201") == 1
    for name in ("request_seconds", "first_byte_seconds"):
        assert value(registry, f"{name}_count", path="/v1/models") == 1
        assert 0 <= value(registry, f"{name}_sum", path="/v1/models") < 60
    assert value(registry, "requests_running") == 0


def test_a_client_that_left_and_a_path_that_there_is_not_have_names():
    registry, _ = observed(App(fails=True), path="/nothing")
    assert value(registry, "requests_total", path=OTHER_PATH, status="499") == 1
    assert value(registry, "request_seconds_count", path=OTHER_PATH) == 1
    assert not value(registry, "first_byte_seconds_count", path=OTHER_PATH)


def test_only_http_is_looked_at():
    app = App()
    registry, _ = observed(app, type="lifespan")
    assert app.scopes[0]["type"] == "lifespan"
    assert value(registry, "requests_total", path="/v1/models", status="499") is None


@pytest.mark.parametrize("is_on", [True, False])
def test_the_access_log_has_a_line_a_request(caplog, is_on):
    with caplog.at_level(logging.INFO if is_on else logging.WARNING, ACCESS_LOGGER):
        observed(App(START), client=("10.0.0.5", 1234))
    lines = [record for record in caplog.records if record.name == ACCESS_LOGGER]
    assert len(lines) == is_on
    for line in lines:
        assert line.getMessage().startswith("method='GET' path='/v1/models' status=201 seconds=0.")
        assert line.getMessage().endswith("request_id='r1' client='10.0.0.5'")
        assert (line.status, line.client) == (201, "10.0.0.5")
