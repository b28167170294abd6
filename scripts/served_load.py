"""A `kimi serve` with an OpenAI endpoint on free ports of 127.0.0.1, and streams to it of every kind of client."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_backend.hosting import with_parent
from kimi_backend.hosting.embedded_server import free_port
from kimi_backend.hosting.stubs import find_stubs
from kimi_client import KimiClient, KimiClientError

READY_WITHIN_S = 120.0
WHOLE = "whole"
CUT_OFF = "cut off"
"""The end of a stream that has said nothing of its end."""


@dataclass
class Served:
    """One `kimi serve` and its processes."""

    process: "subprocess.Popen[bytes]"
    ports: dict[str, int]
    log: Path

    @property
    def prefix(self) -> str:
        return f"kimi_{self.ports['http']}_"

    def log_end(self, num_characters: int = 2000) -> str:
        return self.log.read_text(errors="replace")[-num_characters:]

    def is_ready(self) -> bool:
        """Tell whether it writes a token, and one that the draft has helped with."""
        with KimiClient(f"127.0.0.1:{self.ports['grpc']}", timeout_s=3.0) as client:
            try:
                done = client.generate(text_input="x", max_tokens=4, ignore_eos=True)
            except KimiClientError:
                return False
        return bool(done.statistics["is_draft_there"]) and self._endpoint_is_ready()

    def _endpoint_is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["openai"], timeout=3)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    def pid_of(self, name: str) -> int:
        if name == "kimi serve":
            return self.process.pid
        stubs = {stub.model: stub.pid for stub in find_stubs(self.prefix)}
        if name in stubs:
            return stubs[name]
        marks = {
            "tritonserver": (b"bin/tritonserver", f"--http-port={self.ports['http']}".encode()),
            "endpoint": (b"openai", f"--port={self.ports['openai']}".encode()),
            "watchdog": (b"kimi_backend.hosting.watchdog", self.prefix.encode()),
        }[name]
        return next(pid for pid, command in commands() if all(mark in command for mark in marks))

    def what_is_left(self) -> dict[str, int]:
        """Processes and regions of it."""
        marks = (self.prefix.encode(), f"--port={self.ports['openai']}".encode())
        processes = [pid for pid, command in commands() if any(mark in command for mark in marks)]
        return {"processes": len(processes), "regions": len(list(Path("/dev/shm").glob(f"{self.prefix}*")))}


def commands() -> Iterator[tuple[int, bytes]]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if command := (entry / "cmdline").read_bytes():
                yield int(entry.name), command


@contextlib.contextmanager
def serving(
    checkpoint: Path,
    folder: Path,
    *,
    ports: dict[str, int] | None = None,
    variables: Mapping[str, str] | None = None,
    max_model_len: int = 512,
) -> Iterator[Served]:
    """A server that is ready; nothing of it is left afterwards, nor when this process is killed.

    Args:
        ports: http, grpc, metrics and openai; free ones by default.
        variables: environment variables besides this process's.
    """
    ports = ports or {name: free_port() for name in ("http", "grpc", "metrics", "openai")}
    command = [sys.executable, "-S", with_parent.__file__, str(os.getpid())]
    command += [sys.executable, "-m", "kimi_backend.cli.main", "serve", f"--checkpoint={checkpoint}"]
    command += [f"--draft={checkpoint / 'draft'}", "--device=cpu", f"--max-model-len={max_model_len}"]
    command += [f"--kv-tokens={max(16384, max_model_len + 64)}"]
    command += [*(f"--{name}-port={port}" for name, port in ports.items()), "--speculation-policy=fixed"]
    log = folder / "log"
    with log.open("wb") as sink:
        environment = {**os.environ, **(variables or {})}
        process = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True, env=environment)
    served = Served(process, ports, log)
    try:
        wait(lambda: process.poll() is not None or served.is_ready(), READY_WITHIN_S)
        if process.poll() is not None or not served.is_ready():
            raise TimeoutError(
                f"the server ended or was not ready in {READY_WITHIN_S:g} s; end of its log:\n{served.log_end()}"
            )
        yield served
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for pid in [pid for pid, command in commands() if served.prefix.encode() in command]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def wait(condition: Any, within_s: float) -> float:
    """Seconds until it holds; infinite if it does not in time."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > within_s:
            return float("inf")
        time.sleep(0.1)
    return time.monotonic() - start


def run_stream(kind: str, ports: Mapping[str, int], text: str, num_tokens: int, max_retries: int = 0) -> Iterator[str]:
    """Run one stream to its end.

    Args:
        kind: gRPC, HTTP or endpoint.
        max_retries: of gRPC's client.

    Yields:
        At each event how it would have ended with it: "whole", "error", or "" while it goes on.
    Raises:
        KimiClientError, OSError, http.client.HTTPException: it ended so.
    """
    body: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    if kind == "gRPC":
        with KimiClient(f"127.0.0.1:{ports['grpc']}", max_retries=max_retries) as client:
            for chunk in client.stream(text_input=text, max_tokens=num_tokens, ignore_eos=True):
                yield WHOLE if chunk.finish_reason else ""
    elif kind == "HTTP":
        path = "/v2/models/spec_ensemble/generate_stream"
        for line in _post(ports["http"], path, {"text_input": text, **body}):
            value = json.loads(line)
            yield "error" if "error" in value else WHOLE if value.get("finish_reason") else ""
    else:
        for line in _post(ports["openai"], "/v1/completions", {"prompt": text, **body}):
            if line != b"[DONE]":
                value = json.loads(line)
                yield "error" if "error" in value else WHOLE if value["choices"][0]["finish_reason"] else ""


def how_it_ends(pieces: Iterator[str], begun: Any = None) -> str:
    """Run a stream to its end and say how that was; `begun` is called at its first event."""
    how = CUT_OFF
    try:
        for index, piece in enumerate(pieces):
            if index == 0 and begun is not None:
                begun()
            how = piece or how
    except (KimiClientError, OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    return how


def _post(port: int, path: str, body: dict[str, Any]) -> Iterator[bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise http.client.HTTPException(f"status {reply.status}")
        for line in reply:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").strip()
