"""Measure what clients that hold connections, or send bodies without end, cost a new request at the OpenAI endpoint.

    python scripts/bad_connections.py [--checkpoint demo/kimi-nano] [--seconds 3] [--repeats 100] [--only NAME ...]

It starts `kimi serve` on free ports of 127.0.0.1, and for each kind an endpoint of its own before it, under a limit of
descriptors of its own. New requests for one token are timed alone and while the connections are held or the bodies
sent; then what they were told, and what the endpoint's memory and log grew by, are printed. Of a body so many more are
sent, twice: what the second time added to memory.
"""

import argparse
import collections
import contextlib
import functools
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beside import MB, Post, Question, ask_in_turns, json_post, sending
from kimi_backend.hosting.embedded_server import free_port
from served_load import Served, serving, wait

ROOT = Path(__file__).resolve().parent.parent
COMPLETIONS = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
NEW = {"prompt": "hi", "max_tokens": 1}
READY_WITHIN_S = 60.0
ENDED_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Held:
    """Connections that send so much and then nothing."""

    count: int
    sent: bytes
    max_descriptors: int = 1024


@dataclass(frozen=True, slots=True)
class Sent:
    """A body that is sent again and again."""

    body: bytes
    max_descriptors: int = 1024


def _biases(count: int) -> dict[str, float]:
    return {str(number): 1.5 for number in range(count)}


def bad_clients() -> dict[str, Held | Sent]:
    body = b"Content-Length: %d\r\n\r\n"
    return {
        "300 idle connections, 128 descriptors": Held(300, b"", max_descriptors=128),
        "600 half heads": Held(600, HEAD),
        "60 bodies of 8 MB that stall": Held(60, HEAD + body % (8 * MB) + b" " * (8 * MB - 1)),
        "body of 64 MB": Sent(b" " * (64 * MB)),
        "body of 200,000 open brackets": Sent(b"[" * 200_000),
        "chat of 15 MB": Sent(json.dumps({"messages": [{"role": "user", "content": "word " * (3 * MB)}]}).encode()),
        "1,000,000 stops that are numbers": Sent(b'{"prompt": "x", "stop": [%s]}' % b",".join([b"1"] * MB)),
        "5,000,000 empty lists": Sent(b'{"prompt": [%s]}' % b",".join([b"[]"] * (5 * MB))),
        "1,000,000 prompts": Sent(b'{"prompt": [%s]}' % b",".join([b'"a"'] * MB)),
        "a bias for each of 100,000 tokens": Sent(json.dumps({"prompt": "x", "logit_bias": _biases(100_000)}).encode()),
    }


@dataclass
class Endpoint:
    process: "subprocess.Popen[bytes]"
    port: int
    log: Path

    def resident_mb(self) -> float:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096 / MB


@contextlib.contextmanager
def running_endpoint(served: Served, folder: Path, max_descriptors: int) -> Iterator[Endpoint]:
    port, log = free_port(), folder / "endpoint.log"
    command = [sys.executable, "-m", "kimi_backend.cli.main", "openai", f"--port={port}"]
    limits = (max_descriptors, max_descriptors)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, f"--url=127.0.0.1:{served.ports['grpc']}"],
            stdout=sink,
            stderr=sink,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
        )
    new = json_post(port, COMPLETIONS, NEW)
    try:
        if wait(lambda: new.send()[0] == 200, READY_WITHIN_S) == float("inf"):
            raise TimeoutError(log.read_text(errors="replace"))
        yield Endpoint(process, port, log)
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def holding(port: int, held: Held | None) -> Iterator[list[socket.socket]]:
    """Hold the connections open; a client that is cut off comes back only with the next turn."""
    with contextlib.ExitStack() as opened:
        connections = []
        for _ in range(held.count if held else 0):
            connections.append(opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)))
            with contextlib.suppress(OSError):
                connections[-1].sendall(held.sent if held else b"")
        yield connections


def how_they_end(port: int, held: Held) -> dict[str, Any]:
    """Hold them until the endpoint has ended all, and say what it told them and how long that took."""
    told: collections.Counter[str] = collections.Counter()
    begin = time.monotonic()
    with holding(port, held) as connections:
        for connection in connections:
            connection.settimeout(max(1.0, begin + ENDED_WITHIN_S - time.monotonic()))
            told[_told(connection)] += 1
    return {"told": dict(told), "all ended after s": round(time.monotonic() - begin, 1)}


def _told(connection: socket.socket) -> str:
    """The status that it was answered with; else whether it was closed, or is still held."""
    try:
        return connection.recv(12).decode(errors="replace")[9:] or "closed"
    except TimeoutError:
        return "held"
    except OSError:
        return "reset"


def what_more_add(endpoint: Endpoint, bad: Sent, repeats: int) -> dict[str, Any]:
    """Send it so often, twice, and say what it was told and what the second time left in memory."""
    post, new = Post(endpoint.port, COMPLETIONS, bad.body), json_post(endpoint.port, COMPLETIONS, NEW)
    told, memory = set(), []
    for _ in range(2):
        told |= {post.send()[0] for _ in range(repeats)}
        new.send()  # the last body is freed behind its reply
        memory.append(endpoint.resident_mb())
    return {"told": sorted(told), f"memory grew MB, by {repeats} more": round(memory[1] - memory[0], 1)}


def measure(served: Served, folder: Path, name: str, bad: Held | Sent, options: argparse.Namespace) -> dict[str, Any]:
    with running_endpoint(served, folder, bad.max_descriptors) as endpoint:
        new = json_post(endpoint.port, COMPLETIONS, NEW)
        statuses: list[int] = []
        memory = [endpoint.resident_mb()]

        def ask() -> float:
            status, took = new.send()
            statuses.append(status)
            memory.append(endpoint.resident_mb())
            return took

        disturbances: list[Callable[[], Any]]
        if isinstance(bad, Held):
            disturbances = [functools.partial(holding, endpoint.port, held) for held in (None, bad)]
        else:
            posts = (None, Post(endpoint.port, COMPLETIONS, bad.body))
            disturbances = [functools.partial(sending, post) for post in posts]
        start = time.monotonic()
        questions = [Question(ask), Question(ask, max)]
        alone, beside = ask_in_turns(questions, disturbances, options.seconds)
        if isinstance(bad, Held):
            ends = how_they_end(endpoint.port, bad)
        else:
            ends = what_more_add(endpoint, bad, options.repeats)
        ask()
        return {
            "bad client": name,
            **ends,
            "new request alone ms": alone[0],
            "beside ms": beside[0],
            "beside, worst ms": beside[1],
            "new requests refused": sum(status != 200 for status in statuses),
            "memory grew MB, at most": round(max(memory) - memory[0], 1),
            "memory grew MB, at the end": round(endpoint.resident_mb() - memory[0], 1),
            "log kB a minute": round(endpoint.log.stat().st_size / 1e3 * 60 / (time.monotonic() - start), 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "demo/kimi-nano")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=list(bad_clients()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, serving(options.checkpoint.resolve(), Path(name)) as served:
        for kind, bad in bad_clients().items():
            if options.only is None or kind in options.only:
                row = measure(served, Path(name), kind, bad, options)
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
