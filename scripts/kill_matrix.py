"""Kills, ends and pauses each process of a served model under load, and prints what its clients and the server did.

    python scripts/kill_matrix.py [--checkpoint demo/kimi-nano] [--rounds 3] [--only spec_ensemble ...] [--json OUT]

Every case starts `kimi serve` with an OpenAI endpoint on free ports of 127.0.0.1, runs 16 streams (gRPC, HTTP and the
endpoint), sends one process a signal, and looks until all streams have ended and the service is back or gone.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from served_load import Served, how_it_ends, run_stream, serving, wait

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = ("spec_ensemble", "kimi_target", "eagle3_draft", "tritonserver", "kimi serve", "endpoint", "watchdog")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP 5 s")
CLIENTS = ("gRPC",) * 6 + ("HTTP",) * 5 + ("endpoint",) * 5
NUM_TOKENS = 400
ENDS_WITHIN_S = 180.0
PAUSE_S = 5.0


@dataclass
class Streams:
    """16 streams at once, and when and how each ended."""

    served: Served
    ends: dict[int, tuple[float, str]] = field(default_factory=dict)
    num_begun: int = 0

    def run(self) -> None:
        for number, kind in enumerate(CLIENTS):
            threading.Thread(target=self._run_one, args=(number, kind), daemon=True).start()
        wait(lambda: self.num_begun == len(CLIENTS), 60)

    def _run_one(self, number: int, kind: str) -> None:
        how = how_it_ends(run_stream(kind, self.served.ports, f"tell {number}", NUM_TOKENS), self._begin)
        self.ends[number] = time.monotonic(), f"{kind}: {how.split(':')[0]}"

    def _begin(self) -> None:
        self.num_begun += 1


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
        wait(lambda: len(streams.ends) == len(CLIENTS), ENDS_WITHIN_S)
        ends = list(streams.ends.values())
        last_s = max((when for when, _ in ends), default=start) - start
        how: dict[str, int] = {}
        last: dict[str, float] = {}
        for when, kind in ends:
            how[kind] = how.get(kind, 0) + 1
            last[kind] = round(max(last.get(kind, 0.0), when - start), 1)
        is_back: list[bool] = []

        def settled() -> bool:
            is_back.append(served.is_ready())
            gone = served.process.poll() is not None and not any(served.what_is_left().values())
            return is_back[-1] or gone

        settled_s = wait(settled, ENDS_WITHIN_S)
        code = served.process.poll()
        return {
            "process": name,
            "signal": signal_name,
            "streams": how,
            "last of each s": last,
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
