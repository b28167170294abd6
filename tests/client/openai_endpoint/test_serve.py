"""The endpoint as a process: what it opens and says before it serves."""

import signal
import socket
import sys
from types import SimpleNamespace

import pytest

from kimi_openai import EndpointSettings
from kimi_openai.serve import BACKLOG, make_server, open_socket, serve

serve_module = sys.modules["kimi_openai.serve"]
"""The package has a function of its name."""


class Client:
    """A client of a server that is ready or not."""

    url = "localhost:1"

    def __init__(self, *, is_ready):
        self.is_ready = lambda: is_ready

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class Started:
    """Everything that a start does, none of it for real but for the socket."""

    def __init__(self, monkeypatch, *, is_ready=True):
        self.said, self.handlers, self.metrics, self.logs, self.tracers, self.listeners = [], {}, [], [], [], []
        inline = SimpleNamespace(Thread=lambda target, args, daemon: SimpleNamespace(start=lambda: target(*args)))
        monkeypatch.setattr(serve_module, "threading", inline)
        monkeypatch.setattr(serve_module, "KimiClient", lambda url: Client(is_ready=is_ready))
        monkeypatch.setattr(serve_module, "set_up_logs", lambda **given: self.logs.append(given))
        monkeypatch.setattr(serve_module, "start_http_server", lambda *given: self.metrics.append(given[:2]))
        monkeypatch.setattr(serve_module.signal, "signal", self.handlers.__setitem__)
        monkeypatch.setattr("kimi_openai.tracing.RequestTracer.to", lambda endpoint: self.tracers.append(endpoint))
        run = SimpleNamespace(run=lambda sockets: self.listeners.extend(s.getsockname() for s in sockets))
        monkeypatch.setattr(serve_module, "make_server", lambda settings, endpoint: run)

    def serve(self, host="127.0.0.1", **options):
        serve(EndpointSettings(model_names=("a", "b")), host=host, port=0, say=self.said.append, **options)
        return self.listeners[0][1]


def test_it_says_where_it_listens(monkeypatch):
    started = Started(monkeypatch)
    port = started.serve()
    assert started.said == [f"http://127.0.0.1:{port}/v1 for a, b, answered by localhost:8001"]
    assert (started.metrics, started.tracers) == ([], [])
    assert started.logs == [{"as_json": False, "with_access": False}]
    assert started.handlers.keys() == {signal.SIGTERM, signal.SIGINT}
    assert started.handlers[signal.SIGINT](2, None) is None


def test_options_open_more(monkeypatch):
    started = Started(monkeypatch, is_ready=False)
    started.serve(metrics_port=4711, logs_json=True, logs_access=True, otlp_endpoint="http://collector")
    assert started.metrics == [(4711, "127.0.0.1")]
    assert started.tracers == ["http://collector"]
    assert started.logs == [{"as_json": True, "with_access": True}]
    assert started.said[0] == "metrics at http://127.0.0.1:4711/metrics"
    assert started.said[2].startswith("nobody answers at localhost:1: requests get 503")


def test_an_address_of_the_newer_kind_stands_in_brackets(monkeypatch):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    started = Started(monkeypatch)
    port = started.serve(host="::1")
    assert started.said[0].startswith(f"http://[::1]:{port}/v1 ")


def test_a_port_that_is_taken_is_named():
    with open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port} cannot be taken"):
            open_socket("127.0.0.1", port)


def test_the_server_waits_for_streams_and_says_little():
    config = make_server(EndpointSettings(stop_within_s=7)).config
    assert (config.timeout_graceful_shutdown, config.access_log, config.ws) == (7, False, "none")
    assert (config.lifespan, config.log_config, config.log_level) == ("on", None, "warning")
    assert config.backlog < BACKLOG
