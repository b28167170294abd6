"""The MPS daemon's life: started where it can be, given up cleanly where not, ended with the server.

A script stands in for NVIDIA's control program: it keeps a process as the daemon, writes its id where the real one does
and ends it at `quit`. What a GPU does under the real one is tested in `tests/server/test_on_gpu.py`.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from kimi_backend.cli.serve import maybe_mps
from kimi_backend.config.settings import ServingSettings
from kimi_backend.serving import mps
from kimi_backend.serving.mps import MpsUnavailable, start_mps, stop_mps
from kimi_backend.serving.processes import is_alive

CONTROL_SCRIPT = """#!/bin/sh
pid=$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid
if [ "$1" = -d ]; then
  [ -z "$FAILS" ] || { echo "no permission" >&2; exit 1; }
  sleep 600 >/dev/null 2>&1 &
  echo $! > "$pid"
else
  read -r line
  [ "$line" = "quit -t 2" ] && [ -z "$IGNORES_QUIT" ] && kill "$(cat "$pid")"
fi
exit 0
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With the control program on the PATH."""
    script = tmp_path / "bin" / mps.CONTROL
    script.parent.mkdir()
    script.write_text(CONTROL_SCRIPT)
    script.chmod(0o755)
    return {"PATH": f"{script.parent}:{os.environ['PATH']}"}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("m")


def daemon(folder: Path) -> int:
    return int((folder / "pipe/nvidia-cuda-mps-control.pid").read_text())


def is_gone(process_id: int) -> bool:
    """Whether it ends within a moment."""
    deadline = time.monotonic() + 2
    while is_alive(process_id) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(process_id)


def test_a_daemon_runs_until_it_is_stopped(environment: dict[str, str], folder: Path) -> None:
    seen: list[dict[str, str]] = []
    variables = start_mps(folder, environment, lambda client: not seen.append(dict(client)))  # type: ignore[func-returns-value]
    assert seen == [{**environment, **variables}]
    assert variables == {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }
    assert is_alive(daemon(folder))
    stop_mps(folder, environment)
    assert is_gone(daemon(folder))
    stop_mps(folder, environment)  # again, as after a crash


@pytest.mark.parametrize(
    ("visible", "of_a_client"), [("3", "0"), ("2,0", "0,1"), ("GPU-5e1f", "GPU-5e1f")], ids=["index", "indices", "name"]
)
def test_a_client_counts_the_daemons_gpus(
    environment: dict[str, str], folder: Path, visible: str, of_a_client: str
) -> None:
    seen: list[str] = []
    given = {**environment, "CUDA_VISIBLE_DEVICES": visible}

    def probe(client: Mapping[str, str]) -> bool:
        seen.append(client["CUDA_VISIBLE_DEVICES"])
        return True

    start_mps(folder, given, probe)
    stop_mps(folder, given)
    assert seen == [of_a_client]


def test_a_daemon_that_does_not_listen_is_killed(
    environment: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "_STOP_S", 0.4)
    start_mps(folder, environment, lambda _: True)
    stop_mps(folder, {**environment, "IGNORES_QUIT": "1"})
    assert is_gone(daemon(folder))


def test_a_daemon_that_serves_nobody_is_stopped_again(environment: dict[str, str], folder: Path) -> None:
    with pytest.raises(MpsUnavailable, match="a first client did not get a context"):
        start_mps(folder, environment, lambda _: False)
    assert is_gone(daemon(folder))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"PATH": "/nowhere"}, "nvidia-cuda-mps-control is not on the PATH"),
        ({"CUDA_MPS_PIPE_DIRECTORY": "/elsewhere"}, "the daemon that it names is used"),
        ({"FAILS": "1"}, "ended with code 1: no permission"),
    ],
    ids=["absent", "another", "refused"],
)
def test_why_there_is_none(environment: dict[str, str], folder: Path, change: dict[str, str], reason: str) -> None:
    with pytest.raises(MpsUnavailable, match=reason):
        start_mps(folder, {**environment, **change}, lambda _: True)
    assert not (folder / "pipe/nvidia-cuda-mps-control.pid").exists()


def test_the_probe_says_no_without_a_driver() -> None:
    assert mps.client_works({"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}) is False


def test_the_command_line_says_which(environment: dict[str, str], folder: Path) -> None:
    """A client cannot work where there is no GPU: the script is told so, and no daemon is left."""
    command = [sys.executable, "-m", "kimi_backend.serving.mps"]
    variables = {**environment, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, "start", str(folder)], env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == mps.NOT_RUNNING
    assert done.stderr == "without MPS: a first client did not get a context\n"
    assert is_gone(daemon(folder))
    assert subprocess.run([*command, "stop", str(folder)], env=variables, timeout=60).returncode == 0


def test_serve_starts_and_stops_one(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", environment["PATH"])
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(mps.start_mps, "__defaults__", (lambda _: True,))
    said: list[str] = []
    with maybe_mps(ServingSettings(draft="draft", device="cuda"), said.append) as variables:
        process_id = daemon(Path(variables["CUDA_MPS_PIPE_DIRECTORY"]).parent)
        assert is_alive(process_id)
    assert is_gone(process_id)
    assert not Path(variables["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    assert said == ["with MPS: target and draft share the GPU without changing contexts"]


def test_serve_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    said: list[str] = []
    with maybe_mps(ServingSettings(draft="draft", device="cuda"), said.append) as variables:
        assert variables == {}
    assert said == ["without MPS: nvidia-cuda-mps-control is not on the PATH"]


@pytest.mark.parametrize(
    "settings",
    [
        ServingSettings(draft="draft", device="cuda", mps="off"),
        ServingSettings(draft="draft", device="cpu"),
        ServingSettings(device="cuda"),
    ],
    ids=["off", "cpu", "no draft"],
)
def test_serve_starts_none_where_none_is_wanted(environment: dict[str, str], settings: ServingSettings) -> None:
    said: list[str] = []
    with maybe_mps(settings, said.append) as variables:
        assert variables == {}
    assert said == []
