"""A model is loaded again over gRPC, where loading holds up nobody's stream, and over HTTP where gRPC cannot be had."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from kimi_backend.hosting import server_api
from kimi_backend.hosting.server_api import ServerApi

SECRET = "of-this-test"


class Http(BaseHTTPRequestHandler):
    calls: "list[str]"

    def do_POST(self) -> None:
        assert self.headers["kimi-admin"] == SECRET
        self.calls.append(self.path.rsplit("/", 1)[1])
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(400)  # not ready
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def http() -> Iterator[ThreadingHTTPServer]:
    Http.calls = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Http) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


class Loads(grpc.GenericRpcHandler):
    """A gRPC server's side of the one call."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.loaded: list[str] = []

    def service(self, details: Any) -> Any:
        assert details.method == "/inference.GRPCInferenceService/RepositoryModelLoad"
        assert ("triton-grpc-protocol-kimi-admin", SECRET) in details.invocation_metadata
        return grpc.unary_unary_rpc_method_handler(self._load)

    def _load(self, request: bytes, context: Any) -> bytes:
        self.loaded.append(service_pb2.RepositoryModelLoadRequest.FromString(request).model_name)
        if self.refusal:
            context.abort(grpc.StatusCode.INTERNAL, self.refusal)
        return b""


def reload(http: ThreadingHTTPServer, handler: Loads | None) -> None:
    server = grpc.server(ThreadPoolExecutor(1), handlers=() if handler is None else (handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    if handler is None:
        server.stop(None).wait()
        del server  # nobody listens there any more
    ServerApi(f"127.0.0.1:{http.server_address[1]}", SECRET, f"127.0.0.1:{port}").reload("eagle3_draft")
    if handler is not None:
        server.stop(None).wait()


def test_it_is_unloaded_over_http_and_loaded_over_grpc(http: ThreadingHTTPServer) -> None:
    handler = Loads()
    reload(http, handler)
    assert (Http.calls, handler.loaded) == (["unload"], ["eagle3_draft"])


def test_over_http_where_grpc_does_not_answer(http: ThreadingHTTPServer) -> None:
    reload(http, None)
    assert Http.calls == ["unload", "load"]


def test_what_the_server_says_against_it_is_an_error(http: ThreadingHTTPServer) -> None:
    with pytest.raises(OSError, match="no such file"):
        reload(http, Loads("no such file"))
    assert Http.calls == ["unload"]


def test_readiness_is_yes_no_or_nobody_there(http: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{http.server_address[1]}"
    assert ServerApi(address, SECRET).is_ready("kimi_target") is False
    asked: list[str] = []

    def answer(self: Http) -> None:
        asked.append(self.path)
        self.send_response(200)
        self.end_headers()

    monkeypatch.setattr(Http, "do_GET", answer)
    assert ServerApi(address, SECRET).is_ready("kimi_target") is True
    assert asked == ["/v2/models/kimi_target/ready"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert ServerApi(f"127.0.0.1:{taken.getsockname()[1]}", SECRET).is_ready("kimi_target") is None


def test_a_model_that_takes_its_time_to_unload_is_waited_for(
    http: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, slept = iter([True, True, False]), list[float]()
    monkeypatch.setattr(ServerApi, "is_ready", lambda self, model: next(answers))
    monkeypatch.setattr(server_api, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    handler = Loads()
    reload(http, handler)
    assert slept == [server_api._POLL_S] * 2
    assert handler.loaded == ["eagle3_draft"]
    monkeypatch.setattr(ServerApi, "is_ready", lambda self, model: True)
    monkeypatch.setattr(server_api, "_LOAD_S", 1.0)
    reload(http, Loads())
    assert len(slept) == 2 + round(1.0 / server_api._POLL_S)
