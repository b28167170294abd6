"""The engine's load: sequences, KV blocks, steps and their seconds."""

from kimi_backend.engine.statistics import EngineStatistics
from kimi_backend.serving.metric_kinds import Metric, MetricKind, counter, gauge, labelled

RESPONSE_LAG = "kimi_response_lag_seconds"
UPDATES = "kimi_metrics_updates_total"
PHASES = ("schedule", "target", "commit", "draft", "publish")
MODELS = ("target", "draft")


def _blocks(statistics: EngineStatistics) -> dict[str, float]:
    return {"target": statistics.target_blocks_total, "draft": statistics.draft_blocks_total}


def _blocks_used(statistics: EngineStatistics) -> dict[str, float]:
    return {"target": statistics.target_blocks_held, "draft": statistics.draft_blocks_held}


def _cache_usage(statistics: EngineStatistics) -> float:
    total = statistics.target_blocks_total
    return statistics.target_blocks_held / total if total else 0.0


LOAD: tuple[Metric, ...] = (
    Metric(
        name=UPDATES,
        kind=MetricKind.COUNTER,
        meaning="Updates of these metrics, each counted when it is whole: while it stands still the others are old.",
        read=lambda _: {},
    ),
    Metric(
        name=RESPONSE_LAG,
        kind=MetricKind.GAUGE,
        meaning="Age of the oldest output that is ready and has not been sent to its client.",
        read=lambda _: {},
    ),
    gauge("kimi_requests_running", "Sequences that hold a row.", lambda s: s.num_running, "vllm:num_requests_running"),
    gauge(
        "kimi_requests_waiting",
        "Requests that wait for room, preempted ones included.",
        lambda s: s.num_waiting,
        "vllm:num_requests_waiting",
    ),
    counter(
        "kimi_preemptions_total",
        "Times a running sequence gave its blocks up.",
        lambda s: s.num_preemptions,
        "vllm:num_preemptions_total",
    ),
    labelled(MetricKind.GAUGE, "kimi_kv_blocks", "Blocks of the pool.", "pool", MODELS, _blocks),
    labelled(
        MetricKind.GAUGE,
        "kimi_kv_blocks_used",
        "Blocks that sequences hold; cached blocks that nobody holds are free.",
        "pool",
        MODELS,
        _blocks_used,
    ),
    gauge(
        "kimi_kv_cache_usage",
        "Used part of the target's pool, 0 to 1.",
        _cache_usage,
        "vllm:kv_cache_usage_perc",
    ),
    counter("kimi_steps_total", "Steps sent to the target.", lambda s: s.num_steps),
    labelled(
        MetricKind.COUNTER,
        "kimi_step_seconds_total",
        "The engine thread's seconds by phase of the step; `target` and `draft` are waits for the runners, for either"
        " in the phase of the other where steps overlap.",
        "phase",
        PHASES,
        lambda s: s.step_seconds,
    ),
    labelled(
        MetricKind.COUNTER,
        "kimi_runner_seconds_total",
        "Seconds that the runners took of the phases `target` and `draft`; the rest is the way there and back. A draft"
        " that is called beside the target has no phase, and nothing here.",
        "runner",
        MODELS,
        lambda s: s.runner_seconds,
    ),
)
