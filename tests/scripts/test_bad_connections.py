"""The measure of clients that hold connections or send bad bodies, over an HTTP server in this process."""

import argparse
import contextlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

import bad_connections
from bad_connections import Endpoint, Held, Sent, measure

OPTIONS = argparse.Namespace(seconds=0.0, repeats=3)


class Handler(BaseHTTPRequestHandler):
    """Answer JSON with 200 and other bodies with 400; end connections that send nothing."""

    timeout = 0.1

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        self.send_response(200 if body.startswith(b"{") else 400)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[bytes]]:
    """Bodies that the server got. Its memory is 10 MB, and one more each time that somebody looks."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies = []  # type: ignore[attr-defined]
    log = tmp_path / "log"
    log.write_bytes(bytes(1000))
    endpoint = Endpoint(SimpleNamespace(pid=os.getpid()), server.server_port, log)  # type: ignore[arg-type]
    looks = iter(range(10, 1000))
    monkeypatch.setattr(Endpoint, "resident_mb", lambda endpoint: float(next(looks)))
    monkeypatch.setattr(bad_connections, "running_endpoint", lambda *given: contextlib.nullcontext(endpoint))
    monkeypatch.setattr(bad_connections, "sending", lambda post: contextlib.nullcontext())
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.bodies  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_body_that_is_sent_again_and_again(bodies: list[bytes]) -> None:
    row = measure(None, Path(), "junk", Sent(b"junk"), OPTIONS)  # type: ignore[arg-type]
    asked = 2 * 2 * 4  # two questions, alone and beside it, in each of four turns
    new = json.dumps(bad_connections.NEW).encode()
    assert bodies == [new] * asked + ([b"junk"] * 3 + [new]) * 2 + [new]
    assert (row["told"], row["memory grew MB, by 3 more"]) == ([400], 1.0)
    assert row["new requests refused"] == 0
    # One look before all, one a question asked, two after the repeats, one at the end.
    assert (row["memory grew MB, at most"], row["memory grew MB, at the end"]) == (asked + 3.0, asked + 4.0)
    assert 0 < row["new request alone ms"] < row["beside, worst ms"] * 1e4


def test_connections_that_are_held(bodies: list[bytes]) -> None:
    row = measure(None, Path(), "idle", Held(3, b""), OPTIONS)  # type: ignore[arg-type]
    assert row["told"] == {"closed": 3}
    assert row["all ended after s"] < 10
    assert len(bodies) == 2 * 2 * 4 + 1
    assert row["log kB a minute"] > 0


def test_every_kind_can_be_sent() -> None:
    for kind in bad_connections.bad_clients().values():
        sent, count = (kind.sent, kind.count) if isinstance(kind, Held) else (kind.body, 1)
        assert isinstance(sent, bytes)
        assert 0 < count < 10_000 and kind.max_descriptors >= 128
