"""`/metrics` of the real server says what the responses said, to the last count."""

import time

import pytest

from kimi_backend.serving.metric_kinds import MetricKind
from kimi_backend.serving.metric_table import METRICS
from kimi_client import InvalidRequest, KimiClient, RequestTimedOut
from support.prometheus_text import parse_samples, scrape, value
from support.server_process import MAX_MODEL_LEN, assert_everything_is_free, gauge, wait_until_published
from support.waiting import wait_for

PROMPT = "def fibonacci(n):\n    " + "# a prompt of several blocks, so that its second visit is cached\n" * 3


class Watch:
    """Differences of the server's metrics since this object was made."""

    def __init__(self, server):
        self.server = server
        self.before = self._look()

    def _look(self):
        assert_everything_is_free(self.server)
        return parse_samples(scrape(self.server.ports.metrics))

    def rises(self):
        """The rise of a metric up to this call, by which every request has ended: a function of name and labels."""
        now = self._look()
        return lambda name, **labels: value(now, name, **labels) - value(self.before, name, **labels)


@pytest.fixture
def watch(server):
    return Watch(server)


@pytest.fixture
def client(url):
    return KimiClient(url)


def test_every_metric_is_there_with_its_type_and_meaning(server):
    # They come a moment after the server is ready.
    wait_for(lambda: METRICS[-1].vllm_name in scrape(server.ports.metrics), poll_s=0.1)
    lines = scrape(server.ports.metrics).splitlines()
    for metric in METRICS:
        for name in filter(None, (metric.name, metric.vllm_name)):
            assert f"# TYPE {name} {metric.kind.value}" in lines
            assert f"# HELP {name} {metric.meaning}" in lines


def test_counters_equal_the_responses_statistics(watch, client):
    completions = [
        client.generate(text_input=PROMPT, max_tokens=40, seed=7, ignore_eos=True, num_speculative_tokens=k)
        for k in (3, 7, 0, 3)
    ]
    stats = [c.statistics for c in completions]
    speculation = [s["speculative_decoding"] for s in stats if s["speculative_decoding"]]
    assert len(speculation) == 3, "k = 0 does not speculate"
    sums = {
        "spec_decode_num_drafts_total": sum(s["num_spec_steps"] for s in speculation),
        "spec_decode_num_draft_tokens_total": sum(s["num_draft_tokens"] for s in speculation),
        "spec_decode_num_accepted_tokens_total": sum(s["num_accepted_draft_tokens"] for s in speculation),
        "kimi_prompt_tokens_total": sum(s["num_prompt_tokens"] for s in stats),
        "kimi_generation_tokens_total": sum(s["num_output_tokens"] for s in stats),
        "kimi_prefix_cache_query_tokens_total": sum(s["num_prompt_tokens"] for s in stats),
        "kimi_prefix_cache_hit_tokens_total": sum(s["num_cached_tokens"] for s in stats),
        "kimi_time_to_first_token_seconds_count": 4,
        "kimi_inter_token_seconds_count": 4,
        "kimi_request_seconds_count": 4,
        "kimi_queue_seconds_count": 4,
        "kimi_prefill_seconds_count": 4,
        "kimi_decode_seconds_count": 4,
        "kimi_request_prompt_tokens_sum": sum(s["num_prompt_tokens"] for s in stats),
        "kimi_request_generation_tokens_sum": sum(s["num_output_tokens"] for s in stats),
    }
    assert sums["kimi_prefix_cache_hit_tokens_total"] > 0
    aliases = {m.name: m.vllm_name for m in METRICS if m.vllm_name}
    rise = watch.rises()
    for name, wanted in sums.items():
        for published in filter(None, (name, aliases.get(name))):
            assert rise(published) == wanted, published
    for position in range(7):
        for metric, field in (("accepted", "accepted_per_position"), ("draft", "drafted_per_position")):
            wanted = sum(s[field][position] for s in speculation if position < len(s[field]))
            name = f"spec_decode_num_{metric}_tokens_per_pos_total"
            assert rise(name, position=str(position)) == wanted, (name, position)
    assert rise("kimi_requests_finished_total", finish_reason="length") == 4
    assert rise("vllm:request_success_total", finished_reason="length") == 4


def test_histogram_sums_are_the_responses_times(watch, client):
    stats = client.generate(text_input="hi", max_tokens=9, seed=2, ignore_eos=True).statistics
    rise = watch.rises()
    first, total = stats["first_token_time_s"], stats["total_time_s"]
    assert rise("kimi_time_to_first_token_seconds_sum") == pytest.approx(first, abs=1e-4)
    assert rise("kimi_request_seconds_sum") == pytest.approx(total, abs=1e-4)
    assert rise("kimi_inter_token_seconds_sum") == pytest.approx((total - first) / 8, abs=1e-4)
    assert rise("kimi_decode_seconds_sum") == pytest.approx(total - first, abs=1e-4)
    assert rise("kimi_prefill_seconds_sum") == pytest.approx(first - stats["queue_time_s"], abs=1e-4)
    assert rise("kimi_queue_seconds_sum") == pytest.approx(stats["queue_time_s"], abs=1e-4)
    assert rise("kimi_request_seconds_count") == 1
    assert rise("kimi_request_seconds_bucket", le="+Inf") == 1


def test_cancellations_and_refusals_are_counted_by_reason(slow_steps, watch, client):
    stream = client.stream(text_input="tell", max_tokens=MAX_MODEL_LEN - 32, ignore_eos=True)
    next(iter(stream))
    stream.cancel()
    with pytest.raises(RequestTimedOut, match=r"after 0\.15 s"):
        client.generate(text_input="tell", max_tokens=MAX_MODEL_LEN - 32, ignore_eos=True, timeout_s=0.15)
    with pytest.raises(InvalidRequest, match="temperature"):
        client.generate(text_input="hi", temperature=-1.0)
    rise = watch.rises()
    assert [rise("kimi_requests_cancelled_total", reason=why) for why in ("client", "deadline", "shutdown")] == [
        1,
        1,
        0,
    ]
    assert rise("kimi_requests_finished_total", finish_reason="cancelled") == 2
    assert rise("kimi_requests_refused_total", code="INVALID_ARG") == 1


def test_gauges_follow_the_load(server, slow_steps, client):
    streams = [client.stream(text_input=f"t{i}", max_tokens=MAX_MODEL_LEN - 64, ignore_eos=True) for i in range(3)]
    for stream in streams:
        next(iter(stream))
    wait_for(lambda: gauge(server, "spec_accept_length") >= 1, "no round is counted")
    wait_until_published(server)
    samples = parse_samples(scrape(server.ports.metrics))
    assert value(samples, "kimi_requests_running") == value(samples, "vllm:num_requests_running") == 3
    for pool in ("target", "draft"):
        assert 3 <= value(samples, "kimi_kv_blocks_used", pool=pool) <= value(samples, "kimi_kv_blocks", pool=pool)
    assert value(samples, "spec_decode_is_on") == 1
    assert 1 <= value(samples, "spec_accept_length") <= 8
    for stream in streams:
        stream.cancel()
    assert_everything_is_free(server)


def test_step_time_is_split_without_loss(watch, client):
    start = time.monotonic()
    client.generate(text_input="hi", max_tokens=30, ignore_eos=True, seed=1)
    rise = watch.rises()
    assert rise("kimi_steps_total") > 0
    phases = next(m.label_values for m in METRICS if m.name == "kimi_step_seconds_total")
    split = {phase: rise("kimi_step_seconds_total", phase=phase) for phase in phases}
    assert split["target"] > 0
    assert split["draft"] > 0
    assert sum(split.values()) < time.monotonic() - start
    for runner in ("target", "draft"):
        assert 0 < rise("kimi_runner_seconds_total", runner=runner) < split[runner]


def test_counters_are_named_as_counters_are():
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER), metric.name
