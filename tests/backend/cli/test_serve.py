"""`kimi serve` over a server that is scripted: what it checks, starts, says and ends, and its exit code."""

import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_backend.cli import serve as serve_module
from kimi_backend.cli.serve import serve
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ModelUnavailableError
from kimi_backend.hosting import with_parent

SETTINGS = ServingSettings(checkpoint="/t", draft="/d", drain_timeout_s=7.0)


class Served:
    """A server, and everything that was done around it; at each look something may happen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[Any] = []
        self.made: dict[str, Any] = {}
        self.code: int | None = None
        self.handlers: dict[int, Callable[..., Any]] = {}
        self.process = SimpleNamespace(poll=lambda: self.code)
        self.while_it_loads: Callable[[], None] = lambda: None
        self.at_looks: list[Callable[[], None]] = []
        self.ports: dict[str, int] = {}
        for name in ("check_quickly", "check_beside"):
            monkeypatch.setattr(serve_module, name, lambda given, name=name: self.done.append(name))
        monkeypatch.setattr(serve_module, "check_ports", self.ports.update)
        monkeypatch.setattr(serve_module, "make_server", self.make)
        monkeypatch.setattr(serve_module, "raise_descriptor_limit", lambda say: self.done.append("descriptors"))
        monkeypatch.setattr(serve_module, "SupervisedProcess", self.supervise)
        monkeypatch.setattr(serve_module, "_WATCH_S", 0.001)
        monkeypatch.setattr(serve_module.signal, "signal", self.handlers.__setitem__)
        monkeypatch.setattr(serve_module, "free_port", iter(range(9001, 9010)).__next__)

    def make(self, settings: ServingSettings, **given: Any) -> "Served":
        self.made = given
        return self

    def supervise(self, name: str, start: Callable[[], Any], say: Any) -> Any:
        self.done.append(("beside", name))
        return SimpleNamespace(look=lambda: self.look(name), stop=lambda: self.done.append(("stop", name)))

    def look(self, name: str) -> None:
        self.done.append(("look", name))
        if self.at_looks:
            self.at_looks.pop(0)()

    def start(self) -> None:
        self.done.append("start")

    def start_watchdog(self) -> None:
        """Never called: `supervise` starts nothing."""

    def wait_until_ready(self, stop_waiting: Any) -> None:
        self.done.append("wait")
        self.while_it_loads()

    def cut_drain_short(self) -> None:
        self.done.append("cut short")

    def stop(self, drain_s: float, say: Any) -> None:
        self.done.append(("drain", drain_s))

    def interrupt(self) -> None:
        self.handlers[signal.SIGINT](2, None)

    def exit(self) -> None:
        self.code = -6

    def run(self, **given: Any) -> int:
        options: dict[str, Any] = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "openai_port"))
        options |= {"host": "127.0.0.1", "model_repository": None, "log_file": None}
        return serve(SETTINGS, **{**options, **given})


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


def test_it_checks_starts_looks_and_drains(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.at_looks = [lambda: None, served.interrupt]
    assert served.run(grpc_port=8001, triton_args=("--x",)) == 0
    assert served.ports == {"HTTP": 9001, "gRPC": 8001, "metrics": 9002}
    assert served.done == [
        "check_quickly",
        "check_beside",
        "descriptors",
        "start",
        ("beside", "watchdog"),
        "wait",
        ("look", "watchdog"),
        ("look", "watchdog"),
        ("drain", 7.0),
        ("stop", "watchdog"),
    ]
    assert (served.made["host"], served.made["options"], served.made["ends_with_parent"]) == (
        "127.0.0.1",
        ("--x",),
        True,
    )
    said = capsys.readouterr().err
    assert "ready: /t, speculation eagle3, k = 3" in said
    assert "localhost:8001" in said and "localhost:9002/metrics" in said
    assert "live ones have 7 s" in said


def test_a_second_signal_cuts_the_drain_short(served: Served) -> None:
    served.at_looks = [served.interrupt]
    served.run()
    assert "cut short" not in served.done
    served.handlers[signal.SIGTERM](15, None)
    assert served.done[-1] == "cut short"


def test_an_endpoint_runs_beside_and_is_stopped_first(served: Served) -> None:
    served.at_looks = [lambda: None, served.interrupt]
    assert served.run(openai_port=9999) == 0
    assert served.ports["OpenAI"] == 9999
    assert served.done[-3:] == [("drain", 7.0), ("stop", "OpenAI endpoint"), ("stop", "watchdog")]
    assert ("look", "OpenAI endpoint") in served.done


def test_a_server_that_ends_by_itself_is_a_failure(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.at_looks = [served.exit]
    assert served.run() == 1
    said = capsys.readouterr().err
    assert "exited by itself with code -6" in said and "draining" not in said
    assert served.done[-1] == ("stop", "watchdog")


def test_who_stops_it_while_it_loads_is_told_of_no_endpoint(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.while_it_loads = served.interrupt
    assert served.run(openai_port=9999) == 0
    assert ("beside", "OpenAI endpoint") not in served.done
    assert "ready" not in capsys.readouterr().err


def test_nothing_is_left_of_a_server_that_does_not_load(served: Served) -> None:
    def fail() -> None:
        raise ModelUnavailableError("it ended")

    served.while_it_loads = fail
    with pytest.raises(ModelUnavailableError):
        served.run()
    assert served.done[-2:] == [("drain", 7.0), ("stop", "watchdog")]


def test_without_a_draft_speculation_is_said_to_be_off(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    settings = ServingSettings(checkpoint="/t")
    serve_module._say_where(Console(stderr=True), settings, serve_module.ServerPorts(http=1, grpc=2, metrics=3))
    assert "ready: /t, speculation off (no draft)" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "asked"), [("0.0.0.0", "127.0.0.1"), ("10.0.0.5", "10.0.0.5")])
def test_the_endpoint_asks_the_server_where_it_listens(monkeypatch: pytest.MonkeyPatch, host: str, asked: str) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(serve_module.subprocess, "Popen", commands.append)
    monkeypatch.setattr(serve_module.os, "getpid", lambda: 77)
    serve_module._start_endpoint(grpc_port=8001, host=host, port=9000)
    (command,) = commands
    assert command[:4] == [sys.executable, "-S", with_parent.__file__, "77"]
    assert command[4:8] == [sys.executable, "-m", "kimi_backend.cli.main", "openai"]
    assert command[8:] == [f"--url={asked}:8001", f"--host={host}", "--port=9000"]
