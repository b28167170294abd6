"""The publisher alone, over scripted statistics: what it calls, and what it does not call."""

import dataclasses

import pytest

from kimi_backend.engine.emitter import OutputTotals
from kimi_backend.engine.statistics import EngineState, take_statistics
from kimi_backend.serving.metric_table import METRICS
from kimi_backend.serving.metrics import ACCEPT_LENGTH_WINDOW_S, MOST_UNOBSERVED, MetricsPublisher, _RecentAcceptance
from kimi_backend.spec_decode.stats import PROPOSER_NAMES
from kimi_backend.types.request import (
    MAX_SPECULATIVE_TOKENS,
    EndCause,
    FinishReason,
    RequestStats,
    SpeculationStats,
)
from support.reachable import num_entries

NEVER_S = 1e6


class FakeServer:
    """`pb_utils` as far as metrics need it; keeps every value and the number of calls."""

    class TritonModelException(Exception):
        pass

    def __init__(self):
        self.values = {}
        self.num_calls = 0
        self.last_key = None
        server = self

        class Series:
            def __init__(self, name, labels):
                self.key = (name, tuple(v for k, v in labels.items() if k != "model_name"))
                server.values[self.key] = 0.0

            def increment(self, value):
                assert value > 0, "a counter never falls"
                server.last_key = self.key
                server.num_calls += 1
                server.values[self.key] += value

            def set(self, value):
                server.last_key = self.key
                server.num_calls += 1
                server.values[self.key] = value

            def observe(self, value):
                server.last_key = self.key
                server.num_calls += 1
                server.values[self.key] += value

        class MetricFamily:
            COUNTER, GAUGE, HISTOGRAM = range(3)

            def __init__(self, name, description, kind):
                assert description
                self.name = name

            def Metric(self, labels, buckets=None):
                return Series(self.name, labels)

        self.MetricFamily = MetricFamily


def speculation(rounds, drafted, accepted):
    return SpeculationStats(
        num_spec_steps=rounds,
        num_draft_tokens=sum(drafted),
        num_accepted_draft_tokens=sum(accepted),
        drafted_per_position=drafted,
        accepted_per_position=accepted,
    )


class Scripted:
    def __init__(self):
        self.now = take_statistics(EngineState.READY, None, 0, None, OutputTotals())

    def __call__(self):
        return self.now

    def change(self, **changes):
        self.now = dataclasses.replace(self.now, **changes)


@pytest.fixture
def scripted():
    return Scripted()


@pytest.fixture
def server():
    return FakeServer()


@pytest.fixture
def publisher(server, scripted):
    publisher = MetricsPublisher(server, scripted, NEVER_S)
    yield publisher
    publisher.close()


def test_every_series_is_there_from_the_start(server, scripted, publisher):
    """A scraper takes a counter's first value for no increase."""
    publisher.flush()
    before = set(server.values)
    full = tuple(range(1, MAX_SPECULATIVE_TOKENS + 1))
    rounds = speculation(9, full, full)
    scripted.change(
        totals=OutputTotals(
            num_draft_tokens_histogram=(1, *full),
            speculation=rounds,
            speculation_by_proposer=dict.fromkeys(PROPOSER_NAMES.values(), rounds),
        )
    )
    publisher.flush()
    assert server.values["spec_decode_num_verifies_total", (str(MAX_SPECULATIVE_TOKENS),)] == MAX_SPECULATIVE_TOKENS
    assert set(server.values) == before


def test_differences_add_up_to_the_totals(server, scripted, publisher):
    for rounds, drafted, accepted in ((2, (2, 2, 1), (1, 1, 0)), (9, (9, 8, 7, 2), (8, 5, 2, 1))):
        totals = OutputTotals(
            num_finished={FinishReason.STOP: rounds, FinishReason.ERROR: 1},
            num_ended_by={EndCause.BAD_LOGITS: 1, EndCause.DEADLINE: rounds},
            num_prompt_tokens=100 * rounds,
            num_cached_tokens=30 * rounds,
            num_looked_up_tokens=90 * rounds,
            num_output_tokens=50 * rounds,
            speculation=speculation(rounds, drafted, accepted),
        )
        scripted.change(totals=totals, num_running=rounds)
        publisher.flush()
        publisher.flush()
    values = server.values
    for prefix in ("", "vllm:"):
        assert values[prefix + "spec_decode_num_drafts_total", ()] == 9
        assert values[prefix + "spec_decode_num_draft_tokens_total", ()] == 26
        assert values[prefix + "spec_decode_num_accepted_tokens_total", ()] == 16
        positions = [values[prefix + "spec_decode_num_accepted_tokens_per_pos_total", (str(i),)] for i in range(7)]
        assert positions == [8, 5, 2, 1, 0, 0, 0]
    assert values["kimi_prefix_cache_query_tokens_total", ()] == 810
    assert values["vllm:prefix_cache_hits_total", ()] == 270
    assert values["kimi_prompt_tokens_total", ()] == 900
    assert values["vllm:generation_tokens_total", ()] == 450
    assert values["kimi_requests_finished_total", ("stop",)] == values["vllm:request_success_total", ("stop",)] == 9
    assert values["kimi_requests_failed_total", ("bad_logits",)] == 1
    assert values["kimi_requests_cancelled_total", ("deadline",)] == 9
    assert values["vllm:num_requests_running", ()] == 9


def test_nothing_new_costs_one_call_which_comes_last(server, scripted, publisher):
    """Whoever sees the update counted sees all of it."""
    publisher.flush()
    before = server.num_calls
    publisher.flush()
    assert server.num_calls == before + 1
    assert server.values["kimi_metrics_updates_total", ()] == 2
    scripted.change(num_running=3)
    publisher.refused("UNAVAILABLE")
    publisher.flush()
    assert server.last_key == ("kimi_metrics_updates_total", ())


def test_a_finished_request_is_observed_once_at_the_next_flush(server, publisher):
    stats = RequestStats(
        num_prompt_tokens=5,
        num_cached_tokens=0,
        num_output_tokens=11,
        max_tokens=11,
        queue_time_s=0.25,
        first_token_time_s=1.0,
        total_time_s=3.0,
        num_preemptions=0,
        seed=1,
        speculation=None,
    )
    publisher.finished(stats)
    assert server.num_calls == 0, "nothing is called on a request's way"
    publisher.flush()
    publisher.flush()
    assert server.values["kimi_inter_token_seconds", ()] == pytest.approx(0.2)
    assert server.values["vllm:e2e_request_latency_seconds", ()] == 3.0
    assert server.values["kimi_queue_seconds", ()] == 0.25
    publisher.finished(dataclasses.replace(stats, num_output_tokens=0, first_token_time_s=None))
    publisher.flush()
    assert server.values["kimi_time_to_first_token_seconds", ()] == 1.0, "there was no first token"
    assert server.values["kimi_request_seconds", ()] == 6.0


def test_what_happened_last_is_published_by_close(server, scripted):
    publisher = MetricsPublisher(server, scripted, NEVER_S)
    publisher.refused("UNAVAILABLE")
    scripted.change(totals=OutputTotals(num_output_tokens=3))
    publisher.close()
    assert server.values["kimi_generation_tokens_total", ()] == 3
    assert server.values["kimi_requests_refused_total", ("UNAVAILABLE",)] == 1


def test_a_server_without_metrics_serves_all_the_same(scripted, caplog):
    server = FakeServer()

    def refuse(**_):
        raise server.TritonModelException("metrics are not supported")

    server.MetricFamily = type("MetricFamily", (), {"COUNTER": 0, "GAUGE": 1, "HISTOGRAM": 2, "__init__": None})
    server.MetricFamily.__init__ = lambda self, **_: refuse()
    publisher = MetricsPublisher(server, scripted, NEVER_S)
    publisher.refused("INTERNAL")
    publisher.close()
    assert "no metrics" in caplog.text
    for _ in range(2 * MOST_UNOBSERVED):
        publisher.finished(None)
    assert num_entries(publisher) < 1.1 * MOST_UNOBSERVED, "nobody takes them"


def test_no_metric_is_made_before_the_runners_are_there(server, scripted, publisher):
    scripted.change(state=EngineState.STARTING)
    publisher.refused("UNAVAILABLE")
    publisher.flush()
    assert server.values == {}
    scripted.change(state=EngineState.READY)
    publisher.flush()
    assert server.values["kimi_requests_refused_total", ("UNAVAILABLE",)] == 1


def test_interval_0_makes_no_metric(server, scripted):
    publisher = MetricsPublisher(server, scripted, 0)
    publisher.finished(None)
    publisher.close()
    assert server.values == {}


def test_acceptance_length_covers_recent_rounds_only():
    acceptance = _RecentAcceptance()
    assert acceptance.update(0.0, 0, 0) is None
    assert acceptance.update(1.0, 10, 30) == 4.0
    assert acceptance.update(2.0, 20, 30) == 2.5
    later = 2.0 + 2 * ACCEPT_LENGTH_WINDOW_S
    assert acceptance.update(later, 20, 30) == pytest.approx(1.0), "idle: the last rounds stay"
    assert acceptance.update(later + 1, 30, 40) == pytest.approx(2.0)


def test_names_are_unique_and_each_has_one_source():
    names = [name for m in METRICS for name in (m.name, m.vllm_name) if name]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert (metric.read is None) != (metric.observe is None), metric.name
