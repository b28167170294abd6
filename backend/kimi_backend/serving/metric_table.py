"""Every custom metric, declared once: its name, its vLLM name where the meaning is the same, and where it comes from.

docs/metrics.md repeats the table (`make generated`). Counters add up the very numbers that responses report in
`statistics`; histograms observe those responses' times.
"""

from kimi_backend.engine.statistics import EngineStatistics
from kimi_backend.serving.metric_kinds import (
    Metric,
    MetricKind,
    counter,
    gauge,
    histogram,
    labelled,
)
from kimi_backend.types.request import (
    CANCEL_CAUSES,
    MAX_SPECULATIVE_TOKENS,
    EndCause,
    FinishReason,
    RequestStats,
    SpeculationStats,
)

TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
COUNT_BUCKETS = (1, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
"""Of tokens a request."""
PHASES = ("schedule", "target", "commit", "draft", "publish")
RUNNERS = ("target", "draft")
REFUSAL_CODES = ("INVALID_ARG", "UNAVAILABLE", "INTERNAL")
_POSITIONS = tuple(map(str, range(MAX_SPECULATIVE_TOKENS)))
_NO_SPECULATION = SpeculationStats()


def _speculation(statistics: EngineStatistics) -> SpeculationStats:
    return statistics.totals.speculation or _NO_SPECULATION


def _by_position(counts: tuple[int, ...]) -> dict[str, float]:
    return {str(position): count for position, count in enumerate(counts)}


def _ended(statistics: EngineStatistics, causes: tuple[EndCause, ...]) -> dict[str, float]:
    ended = statistics.totals.num_ended_by
    return {cause.value: ended[cause] for cause in causes if cause in ended}


def _blocks(statistics: EngineStatistics) -> dict[str, float]:
    return {"target": statistics.target_blocks_total, "draft": statistics.draft_blocks_total}


def _blocks_used(statistics: EngineStatistics) -> dict[str, float]:
    return {"target": statistics.target_blocks_held, "draft": statistics.draft_blocks_held}


def _cache_usage(statistics: EngineStatistics) -> float:
    total = statistics.target_blocks_total
    return statistics.target_blocks_held / total if total else 0.0


def _finished(statistics: EngineStatistics) -> dict[str, float]:
    return {reason.value: count for reason, count in statistics.totals.num_finished.items()}


def _succeeded(statistics: EngineStatistics) -> dict[str, float]:
    finished = _finished(statistics)
    return {reason: finished[reason] for reason in ("stop", "length") if reason in finished}


def _inter_token_s(stats: RequestStats) -> float | None:
    if stats.first_token_time_s is None or stats.num_output_tokens < 2:
        return None
    return (stats.total_time_s - stats.first_token_time_s) / (stats.num_output_tokens - 1)


def _prefill_s(stats: RequestStats) -> float | None:
    return None if stats.first_token_time_s is None else stats.first_token_time_s - stats.queue_time_s


def _decode_s(stats: RequestStats) -> float | None:
    return None if stats.first_token_time_s is None else stats.total_time_s - stats.first_token_time_s


FAIL_CAUSES = tuple(cause for cause in EndCause if cause not in CANCEL_CAUSES)
ACCEPT_LENGTH = "spec_accept_length"
REFUSED = "kimi_requests_refused_total"

METRICS: tuple[Metric, ...] = (
    counter(
        "spec_decode_num_drafts_total",
        "Rounds: verifies that carried at least one draft token.",
        lambda s: _speculation(s).num_spec_steps,
        "vllm:spec_decode_num_drafts_total",
    ),
    counter(
        "spec_decode_num_draft_tokens_total",
        "Draft tokens that were verified.",
        lambda s: _speculation(s).num_draft_tokens,
        "vllm:spec_decode_num_draft_tokens_total",
    ),
    counter(
        "spec_decode_num_accepted_tokens_total",
        "Draft tokens that were kept.",
        lambda s: _speculation(s).num_accepted_draft_tokens,
        "vllm:spec_decode_num_accepted_tokens_total",
    ),
    labelled(
        MetricKind.COUNTER,
        "spec_decode_num_accepted_tokens_per_pos_total",
        "Rounds that kept the draft token at this position, counted from 0.",
        "position",
        _POSITIONS,
        lambda s: _by_position(_speculation(s).accepted_per_position),
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ),
    labelled(
        MetricKind.COUNTER,
        "spec_decode_num_draft_tokens_per_pos_total",
        "Rounds that proposed a token at this position, counted from 0.",
        "position",
        _POSITIONS,
        lambda s: _by_position(_speculation(s).drafted_per_position),
    ),
    labelled(
        MetricKind.COUNTER,
        "spec_decode_num_verifies_total",
        "Verifies of a sequence by the draft tokens they carried, 0 included.",
        "num_draft_tokens",
        tuple(map(str, range(MAX_SPECULATIVE_TOKENS + 1))),
        lambda s: _by_position(s.totals.num_draft_tokens_histogram),
    ),
    gauge(
        "spec_decode_num_chosen_tokens",
        "Draft tokens a round that the policy allows now; 0 while it lets nobody draft.",
        lambda s: s.num_chosen_draft_tokens,
    ),
    Metric(
        name=ACCEPT_LENGTH,
        kind=MetricKind.GAUGE,
        meaning="1 + accepted tokens a round, over the last 10 s that had a round; 0 before the first.",
        read=lambda s: {},
    ),
    gauge(
        "spec_decode_is_on",
        "1 while the draft answers; 0 without a draft or while it is lost.",
        lambda s: float(s.is_speculating),
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
    labelled(MetricKind.GAUGE, "kimi_kv_blocks", "Blocks of the pool.", "pool", ("target", "draft"), _blocks),
    labelled(
        MetricKind.GAUGE,
        "kimi_kv_blocks_used",
        "Blocks that sequences hold; cached blocks that nobody holds are free.",
        "pool",
        ("target", "draft"),
        _blocks_used,
    ),
    gauge(
        "kimi_kv_cache_usage",
        "Used part of the target's pool, 0 to 1.",
        _cache_usage,
        "vllm:kv_cache_usage_perc",
    ),
    counter(
        "kimi_prefix_cache_query_tokens_total",
        "Prompt tokens of finished requests that were looked up in the prefix cache.",
        lambda s: s.totals.num_looked_up_tokens,
        "vllm:prefix_cache_queries_total",
    ),
    counter(
        "kimi_prefix_cache_hit_tokens_total",
        "Those of them whose KV was there.",
        lambda s: s.totals.num_cached_tokens,
        "vllm:prefix_cache_hits_total",
    ),
    counter(
        "kimi_prompt_tokens_total",
        "Prompt tokens of finished requests, cached ones included.",
        lambda s: s.totals.num_prompt_tokens,
        "vllm:prompt_tokens_total",
    ),
    counter(
        "kimi_generation_tokens_total",
        "Output tokens.",
        lambda s: s.totals.num_output_tokens,
        "vllm:generation_tokens_total",
    ),
    labelled(
        MetricKind.COUNTER,
        "kimi_requests_finished_total",
        "Requests that got their end, by `finish_reason` of the response; `error`: it failed.",
        "finish_reason",
        tuple(reason.value for reason in FinishReason),
        _finished,
    ),
    labelled(
        MetricKind.COUNTER,
        "vllm:request_success_total",
        "vLLM's form of the same, of those that ended by themselves.",
        "finished_reason",
        ("stop", "length"),
        _succeeded,
    ),
    labelled(
        MetricKind.COUNTER,
        "kimi_requests_cancelled_total",
        "Cancelled requests: `client` cancelled or left, its `deadline` passed, `shutdown`.",
        "reason",
        tuple(cause.value for cause in CANCEL_CAUSES),
        lambda s: _ended(s, CANCEL_CAUSES),
    ),
    labelled(
        MetricKind.COUNTER,
        "kimi_requests_failed_total",
        "Requests that ended with an error after they were taken.",
        "reason",
        tuple(cause.value for cause in FAIL_CAUSES),
        lambda s: _ended(s, FAIL_CAUSES),
    ),
    labelled(
        MetricKind.COUNTER,
        REFUSED,
        "Requests that were answered with an error at once, by its code: wrong, or no room.",
        "code",
        REFUSAL_CODES,
        lambda s: {},
    ),
    counter("kimi_steps_total", "Steps sent to the target.", lambda s: s.num_steps),
    labelled(
        MetricKind.COUNTER,
        "kimi_step_seconds_total",
        "The engine thread's seconds by phase of the step; `target` and `draft` are waits for the runners, for either"
        " in the phase of the other where steps are launched ahead.",
        "phase",
        PHASES,
        lambda s: s.step_seconds,
    ),
    labelled(
        MetricKind.COUNTER,
        "kimi_runner_seconds_total",
        "Seconds that the runners took of the phases `target` and `draft`; the rest is the way there and back.",
        "runner",
        RUNNERS,
        lambda s: s.runner_seconds,
    ),
    histogram(
        "kimi_time_to_first_token_seconds",
        "From arrival to the first token.",
        lambda r: r.first_token_time_s,
        vllm_name="vllm:time_to_first_token_seconds",
    ),
    histogram(
        "kimi_inter_token_seconds",
        "A request's mean time a token after its first.",
        _inter_token_s,
        TOKEN_BUCKETS_S,
        "vllm:request_time_per_output_token_seconds",
    ),
    histogram(
        "kimi_prefill_seconds",
        "From the first step to the first token.",
        _prefill_s,
        vllm_name="vllm:request_prefill_time_seconds",
    ),
    histogram(
        "kimi_decode_seconds",
        "From the first token to the end.",
        _decode_s,
        vllm_name="vllm:request_decode_time_seconds",
    ),
    histogram(
        "kimi_request_prompt_tokens",
        "Prompt tokens a request.",
        lambda r: r.num_prompt_tokens,
        COUNT_BUCKETS,
        "vllm:request_prompt_tokens",
    ),
    histogram(
        "kimi_request_generation_tokens",
        "Output tokens a request.",
        lambda r: r.num_output_tokens,
        COUNT_BUCKETS,
        "vllm:request_generation_tokens",
    ),
    histogram(
        "kimi_request_seconds",
        "From arrival to the end, of every request that was taken.",
        lambda r: r.total_time_s,
        vllm_name="vllm:e2e_request_latency_seconds",
    ),
    histogram(
        "kimi_queue_seconds",
        "From arrival to the first step.",
        lambda r: r.queue_time_s,
        vllm_name="vllm:request_queue_time_seconds",
    ),
)
