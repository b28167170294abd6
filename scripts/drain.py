"""Stops servers under load and says what their clients saw.

    python scripts/drain.py stop --limits 10 60 [--checkpoint demo/kimi-nano] [--json OUT]
    python scripts/drain.py restart [--checkpoint demo/kimi-nano] [--json OUT]

`stop` runs 64 streams over gRPC, HTTP and the OpenAI endpoint, sends `kimi serve` SIGTERM with a `drain_timeout_s` of
each limit, and counts streams that ended whole, by the server's error, and without a word, and what new requests got.

`restart` puts HAProxy (Debian's package) before two servers, keeps 32 streams running through it for all three kinds of
client, restarts one of the two, and counts the requests that did not end whole. HAProxy balances TCP for gRPC, whose
client sends a refused request again (`max_retries`), and HTTP for the others, where it sends them again itself.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_backend.hosting.embedded_server import free_port
from kimi_client import KimiClient
from served_load import CUT_OFF, WHOLE, Served, how_it_ends, run_stream, serving, wait

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("gRPC", "HTTP", "endpoint")
LATE_EVERY_S = 0.5
MAX_RETRIES = 10
PROXY = """
defaults
  timeout connect 2s
  timeout client 120s
  timeout server 120s
  retries 4
  option redispatch 1
listen grpc
  mode tcp
  bind 127.0.0.1:{grpc}
  option httpchk GET /v2/models/spec_ensemble/ready
  default-server inter 250ms fall 1 rise 1
  server first 127.0.0.1:{first[grpc]} check port {first[http]}
  server second 127.0.0.1:{second[grpc]} check port {second[http]}
listen http
  mode http
  bind 127.0.0.1:{http}
  option httpchk GET /v2/models/spec_ensemble/ready
  retry-on conn-failure empty-response 404 503
  default-server inter 250ms fall 1 rise 1
  server first 127.0.0.1:{first[http]} check
  server second 127.0.0.1:{second[http]} check
listen endpoint
  mode http
  bind 127.0.0.1:{openai}
  option httpchk GET /health
  retry-on conn-failure empty-response 503
  default-server inter 250ms fall 1 rise 1
  server first 127.0.0.1:{first[openai]} check
  server second 127.0.0.1:{second[openai]} check
"""
"""24.10 answers 404 for a model that is being unloaded."""


@dataclass
class Load:
    """Streams at once, and how each ended."""

    ports: dict[str, int]
    num_tokens: int
    max_retries: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    num_begun: int = 0
    threads: list[threading.Thread] = field(default_factory=list)
    last_end_s: float = 0.0
    is_over: threading.Event = field(default_factory=threading.Event)

    def start(self, count: int, *, repeats: bool) -> None:
        """Start `count` streams; with `repeats` each is followed by another until `is_over` is set."""
        for number in range(count):
            kind = KINDS[number % len(KINDS)]
            self.threads.append(threading.Thread(target=self._run, args=(kind, number, repeats), daemon=True))
            self.threads[-1].start()

    def _run(self, kind: str, number: int, repeats: bool) -> None:
        while True:
            # Lengths differ, or all streams would end together.
            count = self.num_tokens * (3 + number % 5) // 5
            stream = run_stream(kind, self.ports, f"tell {number}", count, self.max_retries)
            how = how_it_ends(stream, self._begin)
            self.ends[f"{kind}: {how}"] += 1
            self.last_end_s = time.monotonic()
            if not repeats or self.is_over.is_set():
                return

    def _begin(self) -> None:
        self.num_begun += 1

    def count(self, how: str) -> int:
        return sum(number for end, number in self.ends.items() if end.endswith(how))


def stop_under_load(checkpoint: Path, limit_s: float, num_streams: int, num_tokens: int) -> dict[str, Any]:
    """SIGTERM under load; a row of figures."""
    variables = {"KIMI_DRAIN_TIMEOUT_S": str(limit_s)}
    with tempfile.TemporaryDirectory() as folder, serving(checkpoint, Path(folder), variables=variables) as served:
        load, late = Load(served.ports, num_tokens), Load(served.ports, 4)
        load.start(num_streams, repeats=False)
        wait(lambda: load.num_begun == num_streams, 60)
        start = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        with KimiClient(f"127.0.0.1:{served.ports['grpc']}") as client:
            unready_s = wait(lambda: not client.is_ready(), 10)
        while any(thread.is_alive() for thread in load.threads):
            late.start(len(KINDS), repeats=False)
            time.sleep(LATE_EVERY_S)
        code = served.process.wait(60)
        return {
            "limit s": limit_s,
            "unready after s": round(unready_s, 2),
            "ends": dict(sorted(load.ends.items())),
            "whole": load.count(WHOLE),
            "cut off without a word": load.count(CUT_OFF),
            "last stream s": round(load.last_end_s - start, 1),
            "new requests": dict(sorted(late.ends.items())),
            "command ends after s": round(time.monotonic() - start, 1),
            "code": code,
            "left": served.what_is_left(),
        }


@contextmanager
def _balancer(folder: Path, first: Served, second: Served) -> Iterator[dict[str, int]]:
    ports = {name: free_port() for name in ("http", "grpc", "openai")}
    file = folder / "haproxy.cfg"
    file.write_text(PROXY.format(**ports, first=first.ports, second=second.ports))
    process = subprocess.Popen(["haproxy", "-f", str(file)], stderr=(folder / "haproxy.log").open("wb"))
    try:
        time.sleep(2)
        yield ports
    finally:
        process.terminate()
        process.wait()


def restart_one_of_two(checkpoint: Path, num_streams: int, num_tokens: int, limit_s: float) -> dict[str, Any]:
    """Restart one of two servers behind a balancer; a row of figures."""
    variables = {"KIMI_DRAIN_TIMEOUT_S": str(limit_s)}
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(3)]
        first = stack.enter_context(serving(checkpoint, folders[0], variables=variables))
        second = stack.enter_context(serving(checkpoint, folders[1], variables=variables))
        ports = stack.enter_context(_balancer(folders[2], first, second))
        load = Load(ports, num_tokens, MAX_RETRIES)
        load.start(num_streams, repeats=True)
        wait(lambda: load.num_begun >= num_streams, 60)
        before = sum(load.ends.values())
        start = time.monotonic()
        first.process.send_signal(signal.SIGTERM)
        code = first.process.wait(120)
        stopped_s = time.monotonic() - start
        meanwhile = sum(load.ends.values()) - before
        stack.enter_context(serving(checkpoint, folders[0], ports=first.ports, variables=variables))
        restarted_s = time.monotonic() - start
        second.process.send_signal(signal.SIGTERM)
        second.process.wait(120)
        load.is_over.set()
        for thread in load.threads:
            thread.join(120)
        return {
            "streams": num_streams,
            "stopped after s": round(stopped_s, 1),
            "code": code,
            "ready again after s": round(restarted_s, 1),
            "requests that ended meanwhile": meanwhile,
            "requests": sum(load.ends.values()),
            "lost": sum(load.ends.values()) - load.count(WHOLE),
            "ends": dict(sorted(load.ends.items())),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("stop", "restart"))
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "demo/kimi-nano")
    parser.add_argument("--limits", type=float, nargs="+", default=(10.0, 60.0), help="seconds of drain_timeout_s")
    parser.add_argument("--streams", type=int, help="64 of `stop`, 32 of `restart`")
    parser.add_argument("--tokens", type=int, default=200, help="of the longest stream: 7/5 of it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    checkpoint = args.checkpoint.resolve()
    if args.what == "stop":
        rows = [stop_under_load(checkpoint, limit, args.streams or 64, args.tokens) for limit in args.limits]
    else:
        rows = [restart_one_of_two(checkpoint, args.streams or 32, args.tokens // 4, max(args.limits))]
    for row in rows:
        sys.stdout.write(json.dumps(row, indent=1) + "\n")
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
