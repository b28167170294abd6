"""Writes the table by which `replayed_policy.py` and `lookup_by_table.py` time rounds: kimi-nano's costs on this CPU.

    python benchmarks/nano_costs.py [--streams 4] [--json OUT]

A server starts and measures its steps, as each does; two loads then tell, by its own counters, how long the host takes
for a round without the draft, and how much longer with it: the way to the draft and back. It wants an idle machine:
what a start took beside other programs is not kept, and there is no table then.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_backend.runners.cost_file import newest_costs
from kimi_client.load import run_load
from replayed_policy import COSTS
from serving_suite.server_metrics import read_counters
from serving_suite.side_by_side import NANO, ServedCase, provenance, servers_side_by_side

METRICS_INTERVAL_S = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--json", type=Path, default=COSTS)
    args = parser.parse_args()
    draft = str(NANO / "draft")
    settings = ServingSettings(checkpoint=str(NANO), draft=draft, device="cpu", metrics_interval_s=METRICS_INTERVAL_S)
    with servers_side_by_side({"default": settings}) as servers:
        tables = {role: kept_costs(role) for role in ("target", "draft")}
        host_s = [host_seconds(ServedCase("", servers["default"], k), args.streams) for k in (0, 3)]
    report = {**provenance(), "date": time.strftime("%Y-%m-%d %H:%M"), **tables}
    report |= {"host_s": round(host_s[0], 6), "way_s": round(host_s[1] - host_s[0], 6)}
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in report.items())
    args.json.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def kept_costs(role: str) -> dict[str, Any]:
    """The costs that the start has kept."""
    found = newest_costs(role, {"checkpoint": str(NANO)})
    if found is None:
        raise SystemExit(f"no costs of the {role} were kept: other programs were busy while its steps were timed")
    values: dict[str, Any] = json.loads(found[1].to_json(), parse_float=lambda text: round(float(text), 3))
    return values


def host_seconds(case: ServedCase, streams: int) -> float:
    """The host's seconds of a round, without both runners' own. One load comes before the one that counts."""
    requests = [case.request(number, 0.0, 128) for number in range(3 * streams)]
    found = []
    for _ in range(3):
        time.sleep(2 * METRICS_INTERVAL_S)
        found.append(read_counters(case.server.ports.metrics))
        result = asyncio.run(run_load(f"localhost:{case.server.ports.grpc}", requests, streams))
        if result.errors:
            raise SystemExit(str(result.errors[0]))
    done = found[2] - found[1]
    return (done.engine_s + done.calls_s) / done.num_steps


if __name__ == "__main__":
    main()
