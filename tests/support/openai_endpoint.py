"""The OpenAI endpoint on a free port of this process, and plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from support.waiting import PATIENCE_S, wait_for

if TYPE_CHECKING:
    from kimi_openai import EndpointSettings


@dataclass(frozen=True)
class RunningEndpoint:
    port: int

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers, body. A body that is not bytes goes as JSON."""
        connection = self.connect()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        reply = connection.getresponse()
        read = reply.read()
        connection.close()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, read

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of the reply."""
        status, _, data = self.send("POST", path, body)
        return status, json.loads(data)


@contextmanager
def running_endpoint(settings: EndpointSettings, endpoint: Any = None) -> Iterator[RunningEndpoint]:
    # Not above: hosts that only run tests on a GPU have no web server.
    from kimi_openai import make_server, open_socket

    with open_socket("127.0.0.1", 0) as listener:
        server = make_server(settings, endpoint)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_for(lambda: server.started or not thread.is_alive())
        assert server.started
        try:
            yield RunningEndpoint(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()


def read_events(data: bytes) -> list[Any]:
    """The JSON of each event; asserts that the stream is whole and ends with [DONE]."""
    assert data.isascii()
    *events, end, nothing = data.decode().split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]
