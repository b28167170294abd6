"""Measure what a bad request costs a new one beside it, and whether memory goes back after many.

    python scripts/bad_requests.py [--checkpoint demo/kimi-nano] [--repeats 100] [--seconds 3] [--only NAME ...]

It starts `kimi serve` on free ports of 127.0.0.1. For each kind of bad request another client sends one after the other
for some seconds, while a new request for one token is timed again and again; then so many more are sent, and the memory
of the server's processes and its shared-memory regions are compared. Kinds whose name ends with "as large as may be"
are within the limits of docs/protocol.md, and so are parsed, rendered or tokenised before they are refused.
"""

import argparse
import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from kimi_backend.hosting.stubs import find_stubs
from served_load import Served, serving

ROOT = Path(__file__).resolve().parent.parent
MB = 10**6


def _chat(*contents: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content} for content in contents]
    return {"messages": json.dumps(messages), **more}


def _tools(num_bytes: int) -> str:
    function = {"name": "f", "description": "word " * (num_bytes // 5), "parameters": {"type": "object"}}
    return json.dumps([{"type": "function", "function": function}])


def _bias(count: int) -> str:
    return json.dumps({str(number): 1.5 for number in range(count)})


def bad_requests() -> dict[str, dict[str, Any]]:
    """Fields of a request for `generate`, by kind."""
    return {
        "chat of 15 MB": _chat("word " * (3 * MB)),
        "500,000 bad words": {"text_input": "x", "bad_words": ["word"] * 500_000},
        "200,000 messages": _chat(*["word"] * 200_000),
        "messages of 2,000,000 lists": {"messages": f"[{','.join(['[]'] * (2 * MB))}]"},
        "tool description of 10 MB": _chat("x", tools=_tools(10 * MB)),
        "logit bias of 20 MB": {"text_input": "x", "logit_bias": _bias(1_500_000)},
        "text as large as may be": {"text_input": "word " * (8 * MB // 5)},
        "input ids as large as may be": {"input_ids": [1] * 2**21},
        "bad words as large as may be": {"text_input": "x", "bad_words": [f"{i} {'w' * 56}" for i in range(1000)]},
        "messages as large as may be": _chat(*["word " * 300] * 4000),
        "tools as large as may be": _chat("x", tools=_tools(MB - 1000)),
        "logit bias as large as may be": {"text_input": "x", "logit_bias": _bias(16_000)},
    }


def post(port: int, body: bytes) -> tuple[int, float]:
    """(status, seconds) of a `generate`."""
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/v2/models/spec_ensemble/generate", body)
        reply = connection.getresponse()
        reply.read()
        return reply.status, time.perf_counter() - begin
    finally:
        connection.close()


GOOD = json.dumps({"text_input": "hi", "max_tokens": 1}).encode()


def time_good(port: int, until: float) -> list[float]:
    times = []
    while time.perf_counter() < until or len(times) < 3:
        status, seconds = post(port, GOOD)
        assert status == 200, status
        times.append(seconds)
    return times


def resident_mb(served: Served) -> float:
    """Memory of all processes of the server."""
    pids = [stub.pid for stub in find_stubs(served.prefix)] + [served.pid_of("tritonserver")]
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * 4096 / MB


def regions_mb(served: Served) -> float:
    return sum(path.stat().st_size for path in Path("/dev/shm").glob(f"{served.prefix}*")) / MB


def measure(served: Served, name: str, fields: dict[str, Any], seconds: float, repeats: int) -> dict[str, Any]:
    port, body, is_over, bad = served.ports["http"], json.dumps(fields).encode(), threading.Event(), []

    def disturb() -> None:
        while not is_over.is_set():
            bad.append(post(port, body))

    alone = time_good(port, time.perf_counter() + seconds / 2)
    thread = threading.Thread(target=disturb)
    thread.start()
    beside = time_good(port, time.perf_counter() + seconds)
    is_over.set()
    thread.join()
    before = resident_mb(served), regions_mb(served)
    for _ in range(repeats):
        bad.append(post(port, body))
    time.sleep(1)
    return {
        "bad request": name,
        "status": sorted({status for status, _ in bad}),
        "answered in ms": round(1e3 * statistics.median(took for _, took in bad), 1),
        "new request alone ms": round(1e3 * statistics.median(alone), 1),
        "beside ms": round(1e3 * statistics.median(beside), 1),
        "beside, worst ms": round(1e3 * max(beside), 1),
        "memory grew MB": round(resident_mb(served) - before[0], 1),
        "regions grew MB": round(regions_mb(served) - before[1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "demo/kimi-nano")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--only", nargs="+", choices=list(bad_requests()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, serving(options.checkpoint.resolve(), Path(folder)) as served:
        for name, fields in bad_requests().items():
            if options.only is None or name in options.only:
                rows.append(measure(served, name, fields, options.seconds, options.repeats))
                sys.stdout.write(json.dumps(rows[-1]) + "\n")
                sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps({"command": sys.argv, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
