"""The parts of a custom metric: its kind, its names, and how its value is read or observed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from kimi_backend.engine.statistics import EngineStatistics
from kimi_backend.types.request import RequestStats

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
UNLABELLED = ""
"""Key of the only value of a metric without a label of its own."""


class MetricKind(Enum):
    """The kinds, as Prometheus and Triton Server call them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric family. Exactly one of `read` and `observe` is set."""

    name: str
    kind: MetricKind
    meaning: str
    vllm_name: str | None = None
    """Published too, with the same values: what vLLM's dashboards ask for."""
    label: str | None = None
    label_values: tuple[str, ...] = (UNLABELLED,)
    read: Callable[[EngineStatistics], Mapping[str, float]] | None = None
    """Label value -> value since start (counters) or now (gauges)."""
    observe: Callable[[RequestStats], float | None] | None = None
    """A finished request's value; None where it has none."""
    buckets: tuple[float, ...] = ()


def counter(name: str, meaning: str, read: Callable[[EngineStatistics], float], vllm_name: str | None = None) -> Metric:
    """Make a metric that only rises, without a label."""
    return Metric(
        name=name,
        kind=MetricKind.COUNTER,
        meaning=meaning,
        vllm_name=vllm_name,
        read=lambda s: {UNLABELLED: read(s)},
    )


def gauge(name: str, meaning: str, read: Callable[[EngineStatistics], float], vllm_name: str | None = None) -> Metric:
    """Make a metric that rises and falls, without a label."""
    return Metric(
        name=name, kind=MetricKind.GAUGE, meaning=meaning, vllm_name=vllm_name, read=lambda s: {UNLABELLED: read(s)}
    )


def labelled(
    kind: MetricKind,
    name: str,
    meaning: str,
    label: str,
    label_values: tuple[str, ...],
    read: Callable[[EngineStatistics], Mapping[str, float]],
    vllm_name: str | None = None,
) -> Metric:
    """A counter or gauge with a value for each of `label_values`."""
    return Metric(
        name=name,
        kind=kind,
        meaning=meaning,
        vllm_name=vllm_name,
        label=label,
        label_values=label_values,
        read=read,
    )


def histogram(
    name: str,
    meaning: str,
    observe: Callable[[RequestStats], float | None],
    buckets: tuple[float, ...] = LATENCY_BUCKETS_S,
    vllm_name: str | None = None,
) -> Metric:
    """Make one of a number that finished requests have."""
    return Metric(
        name=name,
        kind=MetricKind.HISTOGRAM,
        meaning=meaning,
        vllm_name=vllm_name,
        observe=observe,
        buckets=buckets,
    )
