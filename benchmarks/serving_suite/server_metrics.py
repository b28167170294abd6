"""The server's own counters of where its time goes."""

import re
import urllib.request
from dataclasses import dataclass, fields

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_RUNNERS = "kimi_runner_seconds_total"
_ENGINE = "kimi_step_seconds_total"
_ENGINE_PHASES = ("schedule", "commit", "publish")


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Totals since the server's start; differences and sums of them."""

    num_steps: float = 0.0
    target_s: float = 0.0
    """Inside the target's runner."""
    draft_s: float = 0.0
    """Inside the draft's runner."""
    calls_s: float = 0.0
    """The way from the engine to the runners and back: two process borders a call."""
    engine_s: float = 0.0
    """The engine thread, without its waits for the runners."""

    def __add__(self, other: "ServerCounters") -> "ServerCounters":
        return ServerCounters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: "ServerCounters") -> "ServerCounters":
        return ServerCounters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


def read_counters(metrics_port: int) -> ServerCounters:
    """Read /metrics once. A counter of a model that is not loaded is 0."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as reply:
        samples = [match for match in map(_SAMPLE.match, reply.read().decode().splitlines()) if match]

    def total(name: str, label: str = "") -> float:
        return sum(float(m[3]) for m in samples if m[1] == name and label in (m[2] or ""))

    def phases(*names: str) -> float:
        return sum(total(_ENGINE, f'phase="{name}"') for name in names)

    target_s, draft_s = total(_RUNNERS, 'runner="target"'), total(_RUNNERS, 'runner="draft"')
    return ServerCounters(
        num_steps=total("kimi_steps_total"),
        target_s=target_s,
        draft_s=draft_s,
        calls_s=phases("target", "draft") - target_s - draft_s,
        engine_s=phases(*_ENGINE_PHASES),
    )
