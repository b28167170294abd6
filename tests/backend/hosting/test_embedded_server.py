"""The embedded server: checks before its start, its command line, waiting for it, and an end without a trace."""

import io
import os
import socket
import subprocess
import sys
import threading
import urllib.error
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import pytest

from kimi_backend.errors import ConfigError, ModelUnavailableError
from kimi_backend.hosting import embedded_server
from kimi_backend.hosting.embedded_server import EmbeddedServer, ServerPorts
from kimi_backend.hosting.server_installation import ServerInstallation


def test_a_taken_port_is_refused_before_its_owners_regions_are_swept(monkeypatch):
    swept: list[str] = []
    monkeypatch.setattr(embedded_server, "find_installation", lambda: ServerInstallation(Path("/none"), ()))
    monkeypatch.setattr(embedded_server, "sweep_regions", swept.append)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        server = EmbeddedServer(Path("/none"), ports=ServerPorts(http=other.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"HTTP port: \d+ given, which cannot be taken"):
            server.start()
    assert swept == []


def test_http_stays_on_this_machine_whatever_the_host(monkeypatch):
    monkeypatch.setattr(embedded_server, "find_installation", lambda: ServerInstallation(Path("/none"), ()))
    command = EmbeddedServer(Path("/none"), host="0.0.0.0")._command()
    addresses = {option.split("-address=")[0]: option.split("=")[1] for option in command if "-address=" in option}
    assert addresses == {"--http": "127.0.0.1", "--grpc": "0.0.0.0", "--metrics": "0.0.0.0"}


class World:
    """A process, an API and everything that a server does to them, on a clock of the test's own."""

    def __init__(self, monkeypatch, tmp_path):
        self.done, self.now, self.code, self.pid = [], 100.0, None, 4711
        self.answers = {}
        self.is_stubborn = False
        self.returncode = None
        monkeypatch.delenv("KIMI_DRAIN_FILE", raising=False)
        monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
        monkeypatch.setenv("PATH", "/bin")
        monkeypatch.setattr(embedded_server, "find_installation", lambda: ServerInstallation(Path("/t"), (Path("/l"),)))
        for name in ("check_shared_memory", "check_host", "check_ports", "sweep_regions"):
            monkeypatch.setattr(embedded_server, name, lambda given, name=name: self.done.append((name, given)))
        monkeypatch.setattr(embedded_server, "python_folder", lambda scratch: "/python")
        monkeypatch.setattr(
            embedded_server, "drain", lambda api, file, limit_s, say: self.done.append(("drain", limit_s))
        )
        monkeypatch.setattr(embedded_server, "ServerApi", lambda address, secret: self)
        monkeypatch.setattr(embedded_server.subprocess, "Popen", self.popen)
        monkeypatch.setattr(embedded_server.os, "killpg", lambda pid, number: self.done.append(("killpg", pid, number)))
        monkeypatch.setattr(embedded_server.urllib.request, "urlopen", self.urlopen)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(embedded_server, "time", clock)
        ports = ServerPorts(http=8000, grpc=8001, metrics=8002)
        self.log = tmp_path / "log"
        environment = {"KIMI_CHECKPOINT": "/c"}
        options = {"ports": ports, "environment": environment, "log_file": self.log, "ends_with_parent": True}
        self.server = EmbeddedServer(Path("/repo"), **options)

    def popen(self, command, **given):
        self.command, self.given = command, given
        return self

    def poll(self):
        return self.returncode

    def terminate(self):
        self.done.append("terminate")

    def wait(self, timeout_s=None):
        if timeout_s is not None and self.is_stubborn:
            raise subprocess.TimeoutExpired("server", timeout_s)

    def unload(self, model):
        self.done.append(("unload", model))
        raise OSError("no answer")

    def sleep(self, seconds):
        self.now += seconds

    def urlopen(self, asked, timeout):
        url = asked if isinstance(asked, str) else asked.full_url
        path = url.removeprefix("http://127.0.0.1:8000/v2/")
        answer = self.answers.get(path, 200)
        if answer is None:
            raise OSError("nobody")
        if answer != 200:
            raise urllib.error.HTTPError(url, answer, "", Message(), io.BytesIO())
        return io.BytesIO()


@pytest.fixture
def world(monkeypatch, tmp_path):
    made = World(monkeypatch, tmp_path)
    yield made
    if made.server.runner_secret_file is not None:
        made.server.stop()


def test_it_starts_with_secrets_and_folders_of_its_own(world):
    server = world.server
    with pytest.raises(RuntimeError, match="the server was not started"):
        server.process.poll()
    server.start()
    assert [entry[0] for entry in world.done] == ["check_shared_memory", "check_host", "check_ports", "sweep_regions"]
    assert world.done[0] == ("check_shared_memory", 4)
    assert world.done[2:] == [
        ("check_ports", {"HTTP": 8000, "gRPC": 8001, "metrics": 8002}),
        ("sweep_regions", "kimi_8000_"),
    ]
    environment = world.given["env"]
    assert (environment["LD_LIBRARY_PATH"], environment["PATH"]) == ("/l:/before", "/python:/bin")
    assert environment["KIMI_CHECKPOINT"] == "/c"
    assert environment[embedded_server.LARGE_BYTES_VARIABLE] == str(embedded_server.LARGE_BYTES)
    assert environment[embedded_server.SECRET_FILE_VARIABLE] == str(server.runner_secret_file)
    assert environment[embedded_server.DRAIN_FILE_VARIABLE] == f"{server.runner_secret_file.parent}/drain"
    assert (world.given["start_new_session"], world.given["stderr"]) == (True, subprocess.STDOUT)
    assert world.log.exists()
    assert world.command[:4] == [sys.executable, "-S", embedded_server.with_parent.__file__, str(os.getpid())]
    assert world.command[4] == "/t/bin/tritonserver"


def test_its_command_line(world):
    server = EmbeddedServer(Path("/repo"), ports=world.server.ports, exit_timeout_s=3, options=("--x",), models=("a",))
    server.load_too("b")
    command = server._command()
    assert command[:6] == [
        "/t/bin/tritonserver",
        "--model-repository=/repo",
        "--backend-directory=/t/backends",
        "--model-control-mode=explicit",
        "--load-model=a",
        "--load-model=b",
    ]
    ports = ["--http-port=8000", "--grpc-port=8001", "--metrics-port=8002", "--exit-timeout-secs=3"]
    assert [option for option in command if option in ports] == ports
    settings = {option.split(",")[1] for option in command if option.startswith("--backend-config=python,")}
    assert settings == {
        "shm-region-prefix-name=kimi_8000_",
        f"shm-default-byte-size={embedded_server.REGION_BYTES}",
        f"shm-growth-byte-size={embedded_server.REGION_BYTES}",
        f"thread-pool-size={embedded_server.CALL_THREADS}",
    }
    assert f"kimi-admin={server.admin_secret}" in " ".join(command)
    assert command[-1] == "--x"


READY = {"models/spec_ensemble/generate": 400}


@pytest.mark.parametrize(
    ("answers", "is_ready"),
    [
        (READY, True),
        ({**READY, "health/ready": None}, False),
        ({**READY, "models/eagle3_draft/ready": 400}, False),
        ({**READY, "models/spec_ensemble/generate": 503}, False),
        ({**READY, "models/spec_ensemble/generate": 200}, False),
        ({**READY, "models/spec_ensemble/generate": None}, False),
    ],
)
def test_it_is_ready_when_its_models_and_the_engine_answer(world, answers, is_ready):
    world.answers = answers
    assert world.server._is_ready() is is_ready


def test_without_the_orchestrator_no_engine_is_asked(world):
    world.answers = {"models/spec_ensemble/generate": None}
    assert EmbeddedServer(Path("/repo"), ports=world.server.ports, models=("kimi_target",))._is_ready()


def test_waiting_ends_with_readiness_a_stop_an_exit_or_the_time(world, monkeypatch):
    server, looks = world.server, iter([False, False, True])
    server.start()
    monkeypatch.setattr(server, "_is_ready", lambda: next(looks, False))
    server.wait_until_ready()
    assert world.now == pytest.approx(100.2)
    stop = threading.Event()
    stop.set()
    server.wait_until_ready(stop_waiting=stop)
    with pytest.raises(ModelUnavailableError, match="not ready within 5 s; end of"):
        server.wait_until_ready(timeout_s=5)
    assert world.now == pytest.approx(105.2, abs=0.2)
    world.log.write_text("".join(f"line {number}\n" for number in range(40)))
    world.returncode = -6
    with pytest.raises(ModelUnavailableError) as caught:
        server.wait_until_ready()
    said = str(caught.value)
    assert said.startswith("the server exited with code -6; end of ")
    assert said.splitlines()[1:] == [f"line {number}" for number in range(15, 40)]


def test_a_stop_drains_unloads_ends_and_leaves_nothing(world):
    server = world.server
    server.start()
    secrets = server.runner_secret_file.parent
    server.cut_drain_short()
    assert server._drain_file.limit_s == 0
    world.done.clear()
    world.is_stubborn = True
    server.stop(drain_s=7)
    unloads = [("unload", name) for name in reversed(embedded_server.MODELS)]
    assert world.done == [
        ("drain", 7), *unloads, "terminate", ("killpg", 4711, 9), ("sweep_regions", "kimi_8000_")
    ]  # fmt: skip
    assert not secrets.exists()


def test_a_server_that_has_exited_is_only_swept(world, monkeypatch):
    world.server.start()
    world.done.clear()
    world.returncode = 0

    def gone(pid, number):
        raise ProcessLookupError

    monkeypatch.setattr(embedded_server.os, "killpg", gone)
    world.server.stop()
    assert world.done == [("sweep_regions", "kimi_8000_")]


def test_before_its_start_no_drain_is_cut_short(world):
    world.server.cut_drain_short()


@pytest.mark.parametrize(("host", "asked"), [("0.0.0.0", "127.0.0.1"), ("10.0.0.5", "10.0.0.5")])
def test_its_watchdog_knows_where_it_listens(world, host, asked):
    server = EmbeddedServer(Path("/repo"), ports=world.server.ports, host=host)
    server.start()
    server.start_watchdog()
    assert world.command[3:] == ["4711", str(os.getpid()), "kimi_8000_", "127.0.0.1:8000", f"{asked}:8001"]
    assert world.given["env"][embedded_server.SECRET_VARIABLE] == server.admin_secret
    assert world.given["start_new_session"]
    server.stop()
