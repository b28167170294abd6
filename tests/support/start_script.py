"""Runs docker/start.sh as the container does, with the real tritonserver of the wheel in the container's place."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kimi_backend.hosting.embedded_server import free_port
from kimi_backend.hosting.server_installation import find_installation, python_folder
from kimi_client import KimiClient
from support.server_process import allow_few_descriptors, ended_with_tests
from support.waiting import PATIENCE_S, wait_for

ROOT = Path(__file__).resolve().parents[2]
START = ROOT / "docker/start.sh"


@dataclass(frozen=True, slots=True)
class StartedServer:
    process: "subprocess.Popen[bytes]"
    http: int
    grpc: int
    metrics: int
    log: Path

    def health(self, *options: str) -> "subprocess.CompletedProcess[str]":
        """`kimi health` against it."""
        command = [sys.executable, "-m", "kimi_backend.cli.main", "health", f"--url=localhost:{self.http}", *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    def wait_until_healthy(self) -> None:
        """Return when `kimi health`, a process each time, says so; until the models are there a client asks."""
        with KimiClient(f"localhost:{self.grpc}") as client:

            def is_healthy() -> bool:
                assert self.process.poll() is None, self.log.read_text()
                return client.is_ready() and self.health().returncode == 0

            wait_for(is_healthy, self.log.read_text, poll_s=0.2)


def _write_tritonserver(folder: Path) -> None:
    """A `tritonserver` for the PATH: the wheel's binary, told where its libraries and backends are."""
    installation = find_installation()
    libraries = ":".join(map(str, installation.library_folders))
    script = folder / "tritonserver"
    script.write_text(
        f'#!/bin/sh\nexport LD_LIBRARY_PATH="{libraries}:$LD_LIBRARY_PATH"\n'
        f'exec "{installation.binary}" --backend-directory="{installation.backends}" "$@"\n'
    )
    script.chmod(0o755)


@contextmanager
def started(folder: Path, variables: dict[str, str], *, as_container: bool = True) -> Iterator[StartedServer]:
    """start.sh over free ports, with a low soft limit of descriptors.

    Args:
        as_container: with `tritonserver` on the PATH; else it falls back to the embedded server.
    """
    ports = {name: free_port() for name in ("http", "grpc", "metrics")}
    path = f"{python_folder(folder)}:{os.environ['PATH']}"
    if as_container:
        _write_tritonserver(folder)
        path = f"{folder}:{path}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KIMI_")}
    environment |= {f"KIMI_{name.upper()}_PORT": str(port) for name, port in ports.items()}
    environment |= {"PATH": path, **variables}
    log = folder / "start.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            ended_with_tests([START]),
            env=environment,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            preexec_fn=allow_few_descriptors,
        )
    try:
        yield StartedServer(process, log=log, **ports)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
        process.wait()
