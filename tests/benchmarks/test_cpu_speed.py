"""The CPU measurement: what it reads off a server, and that it never hides a bar it misses."""

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import cpu_speed
from serving_suite.server_metrics import ServerCounters, read_counters

METRICS = """
# HELP kimi_steps_total Steps sent to the target.
kimi_steps_total{model="spec_ensemble",version="1"} 200
kimi_step_seconds_total{model="spec_ensemble",phase="schedule"} 0.25
kimi_step_seconds_total{model="spec_ensemble",phase="target"} 4
kimi_step_seconds_total{model="spec_ensemble",phase="commit"} 0.5
kimi_step_seconds_total{model="spec_ensemble",phase="draft"} 3
kimi_step_seconds_total{model="spec_ensemble",phase="publish"} 0.125
kimi_runner_seconds_total{model="spec_ensemble",runner="target"} 3.5
kimi_runner_seconds_total{model="spec_ensemble",runner="draft"} 2
"""


@pytest.fixture
def metrics_port() -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_counters_divide_a_step(metrics_port: int) -> None:
    counters = read_counters(metrics_port)
    assert counters == ServerCounters(num_steps=200, target_s=3.5, draft_s=2, calls_s=1.5, engine_s=0.875)
    assert counters - counters + counters == counters


def run(speedup: float, texts_equal: bool = True, bar: float | None = 1.15) -> dict[str, Any]:
    row = dict.fromkeys(("tokens_per_second", "tokens_per_step", "step_ms", "target_ms"), 1.0)
    row |= dict.fromkeys(("draft_ms", "rest_ms", "calls_ms"), 0.5) | {"case": "k = 2", "speedup": speedup}
    return {
        "temperature": 0.0,
        "cases": [row],
        "texts_equal": texts_equal,
        "speedup": speedup,
        "bar": bar,
    }


def test_a_missed_bar_and_a_different_text_are_said() -> None:
    assert "MISSES the bar of 1.15x" in cpu_speed.verdict(run(1.14))
    assert "meets the bar of 1.15x; every text the same" in cpu_speed.verdict(run(1.15))
    assert "bar" not in cpu_speed.verdict(run(1.15, bar=None))
    assert "TEXTS DIFFER" in cpu_speed.verdict(run(2.0, texts_equal=False))


def test_only_its_own_section_is_rewritten(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{cpu_speed.MARKS[0]}old\n{cpu_speed.MARKS[1]}after\n")
    cpu_speed.write_readme(readme, cpu_speed.table({"runs": [run(1.2)]}))
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "| 0 | k = 2 | 1 | 1.20x |" in text
    assert "old" not in text
    readme.write_text("no marks\n")
    with pytest.raises(ValueError, match="lacks the lines"):
        cpu_speed.write_readme(readme, "")
