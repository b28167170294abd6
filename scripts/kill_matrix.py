"""Kills, ends and pauses each process of a served model under load, and prints what its clients and the server did.

    python scripts/kill_matrix.py [--checkpoint demo/kimi-nano] [--rounds 3] [--only spec_ensemble ...] [--json OUT]

Every case starts `kimi serve` with an OpenAI endpoint on free ports of 127.0.0.1, runs 16 streams (gRPC, HTTP and the
endpoint), sends one process a signal, and looks until all streams have ended and the service is back or gone.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_backend.hosting.embedded_server import free_port
from kimi_backend.hosting.stubs import find_stubs
from kimi_client import KimiClient, KimiClientError

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = ("spec_ensemble", "kimi_target", "eagle3_draft", "tritonserver", "kimi serve", "endpoint", "watchdog")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP 5 s")
CLIENTS = ("gRPC",) * 6 + ("HTTP",) * 5 + ("endpoint",) * 5
NUM_TOKENS = 400
READY_WITHIN_S = 120.0
ENDS_WITHIN_S = 60.0
PAUSE_S = 5.0


@dataclass
class Served:
    """One `kimi serve` and its processes."""

    process: "subprocess.Popen[bytes]"
    ports: dict[str, int]
    log: Path

    @property
    def prefix(self) -> str:
        return f"kimi_{self.ports['http']}_"

    def is_ready(self) -> bool:
        """Whether it writes a token, and one that the draft has helped with."""
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
        return next(pid for pid, command in _commands() if all(mark in command for mark in marks))

    def what_is_left(self) -> dict[str, int]:
        """Processes and regions of it."""
        marks = (self.prefix.encode(), f"--port={self.ports['openai']}".encode())
        processes = [pid for pid, command in _commands() if any(mark in command for mark in marks)]
        return {"processes": len(processes), "regions": len(list(Path("/dev/shm").glob(f"{self.prefix}*")))}


def _commands() -> Iterator[tuple[int, bytes]]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if command := (entry / "cmdline").read_bytes():
                yield int(entry.name), command


@contextlib.contextmanager
def serving(checkpoint: Path, folder: Path) -> Iterator[Served]:
    """A server that is ready; nothing of it is left afterwards."""
    ports = {name: free_port() for name in ("http", "grpc", "metrics", "openai")}
    command = [sys.executable, "-m", "kimi_backend.cli.main", "serve", f"--checkpoint={checkpoint}"]
    command += [f"--draft={checkpoint / 'draft'}", "--kv-tokens=16384", "--max-model-len=512", "--device=cpu"]
    command += [*(f"--{name}-port={port}" for name, port in ports.items()), "--speculation-policy=fixed"]
    log = folder / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
    served = Served(process, ports, log)
    try:
        _wait(served.is_ready, READY_WITHIN_S)
        yield served
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for pid in [pid for pid, command in _commands() if served.prefix.encode() in command]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def _wait(condition: Any, within_s: float) -> float:
    """Seconds until it holds; infinite if it does not in time."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > within_s:
            return float("inf")
        time.sleep(0.1)
    return time.monotonic() - start


@dataclass
class Streams:
    """16 streams at once, and when and how each ended."""

    served: Served
    ends: dict[int, tuple[float, str]] = field(default_factory=dict)
    num_begun: int = 0

    def run(self) -> None:
        for number, kind in enumerate(CLIENTS):
            threading.Thread(target=self._run_one, args=(number, kind), daemon=True).start()
        _wait(lambda: self.num_begun == len(CLIENTS), 60)

    def _run_one(self, number: int, kind: str) -> None:
        pieces = {"gRPC": self._grpc, "HTTP": self._http, "endpoint": self._endpoint}[kind](number)
        how = "cut off"
        try:
            for index, piece in enumerate(pieces):
                self.num_begun += index == 0
                how = piece or how
        except (KimiClientError, OSError, http.client.HTTPException) as error:
            how = type(error).__name__
        self.ends[number] = time.monotonic(), f"{kind}: {how}"

    def _grpc(self, number: int) -> Iterator[str]:
        with KimiClient(f"127.0.0.1:{self.served.ports['grpc']}") as client:
            for chunk in client.stream(text_input=f"tell {number}", max_tokens=NUM_TOKENS, ignore_eos=True):
                yield "whole" if chunk.finish_reason else ""

    def _http(self, number: int) -> Iterator[str]:
        body = {"text_input": f"tell {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        for line in self._post("http", "/v2/models/spec_ensemble/generate_stream", body):
            value = json.loads(line)
            yield "error" if "error" in value else "whole" if value.get("finish_reason") else ""

    def _endpoint(self, number: int) -> Iterator[str]:
        body = {"prompt": f"tell {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        for line in self._post("openai", "/v1/completions", body):
            if line != b"[DONE]":
                value = json.loads(line)
                yield "error" if "error" in value else "whole" if value["choices"][0]["finish_reason"] else ""

    def _post(self, port: str, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.served.ports[port], timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    yield line.removeprefix(b"data: ").strip()


def run_case(checkpoint: Path, name: str, signal_name: str) -> dict[str, Any]:
    """One process, one signal."""
    with tempfile.TemporaryDirectory() as folder, serving(checkpoint, Path(folder)) as served:
        streams = Streams(served)
        streams.run()
        pid = served.pid_of(name)
        start = time.monotonic()
        os.kill(pid, getattr(signal, signal_name.split()[0]))
        if signal_name.startswith("SIGSTOP"):
            time.sleep(PAUSE_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        _wait(lambda: len(streams.ends) == len(CLIENTS), ENDS_WITHIN_S)
        ends = list(streams.ends.values())
        last_s = max((when for when, _ in ends), default=start) - start
        how: dict[str, int] = {}
        for _, kind in ends:
            how[kind] = how.get(kind, 0) + 1
        is_back: list[bool] = []

        def settled() -> bool:
            is_back.append(served.is_ready())
            gone = served.process.poll() is not None and not any(served.what_is_left().values())
            return is_back[-1] or gone

        settled_s = _wait(settled, ENDS_WITHIN_S)
        code = served.process.poll()
        return {
            "process": name,
            "signal": signal_name,
            "streams": how,
            "streams left": len(CLIENTS) - len(ends),
            "last stream s": round(last_s, 1),
            "service": "back" if is_back[-1] else f"ended, code {code}" if code is not None else "not back",
            "settled s": round(last_s + settled_s, 1),
            "left": served.what_is_left() if code is not None else {},
            "said": [
                line
                for line in served.log.read_text(errors="replace").splitlines()
                if "watchdog" in line or "by itself" in line
            ],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "demo/kimi-nano")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=PROCESSES, choices=PROCESSES)
    parser.add_argument("--signals", nargs="+", default=SIGNALS, choices=SIGNALS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.only:
        for signal_name in args.signals:
            for _ in range(args.rounds):
                rows.append(run_case(args.checkpoint.resolve(), name, signal_name))
                sys.stdout.write(json.dumps(rows[-1]) + "\n")
                sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
