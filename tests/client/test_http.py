"""The client over HTTP against a server in this process: what it sends, and what it makes of every reply."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc")

from kimi_client import InvalidRequest, KimiClient, RequestTimedOut, ServerBusy, ServerFailed, ServerUnreachable
from kimi_client import _http as http_module
from kimi_client._http import HEADER_LENGTH
from support.waiting import PATIENCE_S


def text_tensor(name: str, text: str) -> tuple[dict[str, Any], bytes]:
    data = len(text.encode()).to_bytes(4, "little") + text.encode()
    return {"name": name, "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(data)}}, data


def reply_of(text: str, num_tokens: int) -> tuple[bytes, bytes]:
    """Header and data of a whole reply."""
    count = np.array([num_tokens], np.uint32).tobytes()
    size = {"binary_data_size": len(count)}
    tensors = [
        text_tensor("text_output", text),
        ({"name": "num_output_tokens", "datatype": "UINT32", "shape": [1, 1], "parameters": size}, count),
        text_tensor("finish_reason", "stop"),
    ]
    header = {"model_name": "spec_ensemble_unary", "outputs": [described for described, _ in tensors]}
    return json.dumps(header).encode(), b"".join(data for _, data in tensors)


class Server(ThreadingHTTPServer):
    """Gives every request the same answer and keeps what came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.content = b""
        self.headers: dict[str, str] = {}
        self.seen: list[SimpleNamespace] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes) -> None:
        self.server.seen.append(SimpleNamespace(path=self.path, headers=dict(self.headers), body=body))
        self.server.may_answer.wait(PATIENCE_S)
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield made
    made.may_answer.set()
    made.shutdown()
    made.server_close()


def client(server: Server, **options: Any) -> KimiClient:
    return KimiClient(server.url, protocol="http", **options)


def answer(server: Server, text: str = "def f", num_tokens: int = 3) -> None:
    header, data = reply_of(text, num_tokens)
    server.content, server.headers = header + data, {HEADER_LENGTH: str(len(header))}


def test_a_request_and_its_only_reply_are_tensors_behind_a_header(server: Server) -> None:
    answer(server)
    with client(server) as one:
        stream = one.stream(text_input="héllo", input_ids=None, max_tokens=3, metadata=(("traceparent", "x"),))
        chunks = list(stream)
    assert [(chunk.text, chunk.num_tokens, chunk.finish_reason) for chunk in chunks] == [("def f", 3, "stop")]
    (seen,) = server.seen
    assert (seen.path, seen.headers["traceparent"]) == ("/v2/models/spec_ensemble_unary/infer", "x")
    length = int(seen.headers[HEADER_LENGTH])
    header, data = json.loads(seen.body[:length]), seen.body[length:]
    assert (header["id"], header["parameters"]) == (stream.request_id, {"binary_data_output": True})
    assert [(tensor["name"], tensor["shape"]) for tensor in header["inputs"]] == [
        ("text_input", [1, 1]),
        ("max_tokens", [1, 1]),
    ]
    sizes = [tensor["parameters"]["binary_data_size"] for tensor in header["inputs"]]
    assert sum(sizes) == len(data)
    assert data[: sizes[0]] == (6).to_bytes(4, "little") + "héllo".encode()
    assert data[sizes[0] :] == (3).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b'{"error": "INVALID_ARG: top_p: 2 given"}', InvalidRequest, "top_p: 2 given"),
        (b'{"error": "UNAVAILABLE: full"}', ServerBusy, "full"),
        (b"<html>", ServerFailed, "HTTP status 500"),
        (b"[]", ServerFailed, "HTTP status 500"),
        (b"{}", ServerFailed, "HTTP status 500"),
    ],
)
def test_an_error_is_the_servers_or_its_status(
    server: Server, content: bytes, error: type[Exception], message: str
) -> None:
    server.status, server.content = 500, content
    with pytest.raises(error, match=message):
        client(server).generate(text_input="x")


def test_a_refused_request_is_sent_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_client._retries.FIRST_PAUSE_S", 1e-3)
    server.status, server.content = 503, b'{"error": "UNAVAILABLE: full"}'
    with pytest.raises(ServerBusy):
        client(server, max_retries=2).generate(text_input="x")
    assert len(server.seen) == 3


def test_it_is_ready_if_the_model_is(server: Server) -> None:
    assert client(server).is_ready()
    assert server.seen[0].path == "/v2/models/spec_ensemble_unary/ready"
    server.status = 400
    assert not client(server).is_ready()


def test_nothing_listening_is_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        one = KimiClient(f"127.0.0.1:{taken.getsockname()[1]}", protocol="http")
        assert not one.is_ready()
        with pytest.raises(ServerUnreachable, match="is the server running, and is this its HTTP port"):
            one.generate(text_input="x")


def test_an_answer_that_is_late_is_no_reply(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_client._transport.DEADLINE_GRACE_S", 0.0)
    server.may_answer.clear()
    with pytest.raises(RequestTimedOut, match="has not answered in time"):
        client(server, timeout_s=0.05).generate(text_input="x")


def test_a_stream_that_is_left_gives_its_connection_up(server: Server) -> None:
    server.may_answer.clear()
    with client(server).stream(text_input="x") as stream:
        connection = stream._call._connection  # type: ignore[attr-defined]
        assert connection.sock is not None
    assert connection.sock is None
    with pytest.raises(ServerUnreachable):
        next(stream._call)


def test_an_error_without_words_is_named_by_its_kind() -> None:
    assert str(http_module._from_os_error(ConnectionResetError())).startswith("ConnectionResetError (is the server")
