"""Publishes the engine's statistics as Triton Server metrics, in batches, from a thread of its own.

A metric call costs about 20 µs, an IPC round trip. Nothing on a request's way makes one: the counters are differences
of the engine's own totals, taken a few times a second, and a finished request's times wait in a queue till then.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from kimi_backend.engine.statistics import EngineState, EngineStatistics
from kimi_backend.serving.metric_kinds import UNLABELLED, Metric, MetricKind
from kimi_backend.serving.metric_table import ACCEPT_LENGTH, METRICS, REFUSED, RESPONSE_LAG, UPDATES
from kimi_backend.types.request import RequestStats

logger = logging.getLogger("kimi_backend.serving")

MODEL_LABEL = {"model_name": "spec_ensemble"}
ACCEPT_LENGTH_WINDOW_S = 10.0
MOST_UNOBSERVED = 10_000
"""Finished requests that wait for the next update; where none comes, as of a server without metrics, older ones go."""


class _Family:
    """A metric under its one or two names, and what of it was published so far."""

    def __init__(self, pb_utils: Any, metric: Metric) -> None:
        self.metric = metric
        self._published: dict[str, float] = {}
        self._series: dict[str, list[Any]] = {}
        kind = getattr(pb_utils.MetricFamily, metric.kind.name)
        names = [metric.name] if metric.vllm_name is None else [metric.name, metric.vllm_name]
        self._families = [pb_utils.MetricFamily(name=name, description=metric.meaning, kind=kind) for name in names]
        for value in metric.label_values:
            self._make_series(value)

    def publish(self, values: Mapping[str, float]) -> None:
        """Bring every label value's series to where it should be; unchanged ones cost nothing."""
        for label_value, value in values.items():
            before = self._published.get(label_value, 0.0)
            if value == before:
                continue
            self._published[label_value] = value
            for series in self._series.get(label_value) or self._make_series(label_value):
                if self.metric.kind is MetricKind.GAUGE:
                    series.set(value)
                else:
                    series.increment(value - before)

    def observe(self, value: float) -> None:
        for series in self._series[UNLABELLED]:
            series.observe(value)

    def close(self) -> None:
        """Metrics must go before their family."""
        self._series.clear()
        self._families.clear()

    def _make_series(self, label_value: str) -> list[Any]:
        labels = dict(MODEL_LABEL)
        if self.metric.label is not None:
            labels[self.metric.label] = label_value
        options = {"buckets": list(self.metric.buckets)} if self.metric.buckets else {}
        series = [family.Metric(labels=labels, **options) for family in self._families]
        self._series[label_value] = series
        return series


class _RecentAcceptance:
    """Acceptance length over the last seconds that had a round."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque([(0.0, 0, 0)])

    def update(self, now_s: float, num_rounds: int, num_accepted: int) -> float | None:
        """None while no round was ever counted."""
        samples = self._samples
        if num_rounds > samples[-1][1]:
            samples.append((now_s, num_rounds, num_accepted))
        # The oldest sample is where the window begins, so one that is too old stays.
        while len(samples) > 2 and samples[1][0] < now_s - ACCEPT_LENGTH_WINDOW_S:
            samples.popleft()
        (_, rounds_before, accepted_before), (_, rounds, accepted) = samples[0], samples[-1]
        return 1 + (accepted - accepted_before) / (rounds - rounds_before) if rounds > rounds_before else None


class MetricsPublisher:
    """Owns the metrics and the thread that updates them."""

    def __init__(
        self,
        pb_utils: Any,
        statistics: Callable[[], EngineStatistics],
        interval_s: float,
        response_lag_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """
        Args:
            statistics: the engine's snapshot.
            response_lag_s: seconds that the oldest output waits to be sent.
            interval_s: seconds between updates; 0: no metrics at all.
        """
        self._statistics = statistics
        self._interval_s = interval_s
        self._response_lag_s = response_lag_s
        self._finished: deque[RequestStats] = deque(maxlen=MOST_UNOBSERVED)
        self._refused: dict[str, int] = {}
        self._refused_lock = threading.Lock()
        self._num_updates = 0
        self._acceptance = _RecentAcceptance()
        self._pb = pb_utils
        self._families: dict[str, _Family] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if interval_s > 0:
            self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
            self._thread.start()

    def finished(self, stats: RequestStats) -> None:
        """Observe a finished request's times; from any thread, costs nothing now."""
        if self._thread is not None:
            self._finished.append(stats)

    def refused(self, code: str) -> None:
        """Count a request that was answered with an error at once."""
        with self._refused_lock:
            self._refused[code] = self._refused.get(code, 0) + 1

    def close(self) -> None:
        """Publish what is left, end the thread, give the metrics up."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        for family in self._families.values():
            family.close()

    def flush(self) -> None:
        """Publish everything that has happened so far. The metrics are made when the engine has met its runners,
        so that nothing is published of a server that is still loading."""
        statistics = self._statistics()
        if not self._families:
            if statistics.state is not EngineState.READY:
                return
            self._families = {metric.name: _Family(self._pb, metric) for metric in METRICS}
        for family in self._families.values():
            if family.metric.read is not None:
                family.publish(family.metric.read(statistics))
        with self._refused_lock:
            refused = dict(self._refused)
        self._families[REFUSED].publish(refused)
        self._families[RESPONSE_LAG].publish({UNLABELLED: self._response_lag_s()})
        self._publish_acceptance(statistics)
        while self._finished:
            self._observe(self._finished.popleft())
        self._num_updates += 1
        self._families[UPDATES].publish({UNLABELLED: self._num_updates})

    def _publish_acceptance(self, statistics: EngineStatistics) -> None:
        speculation = statistics.totals.speculation
        if speculation is None:
            return
        rounds, accepted = speculation.num_spec_steps, speculation.num_accepted_draft_tokens
        length = self._acceptance.update(time.monotonic(), rounds, accepted)
        if length is not None:
            self._families[ACCEPT_LENGTH].publish({UNLABELLED: length})

    def _observe(self, stats: RequestStats) -> None:
        for family in self._families.values():
            if family.metric.observe is not None:
                value = family.metric.observe(stats)
                if value is not None:
                    family.observe(value)

    def _run(self) -> None:
        has_failed = False
        while True:
            is_last = self._closed.wait(self._interval_s)
            try:
                self.flush()
            except Exception as error:
                if not self._families:
                    logger.warning("no metrics: the server does not take them: %s", error)
                    return
                if not has_failed:
                    logger.exception("metrics could not be published; this is said once")
                has_failed = True
            if is_last:
                return
