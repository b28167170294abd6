"""The ends of requests, and how many tokens they had."""

from kimi_backend.engine.statistics import EngineStatistics
from kimi_backend.serving.metric_kinds import Metric, MetricKind, counter, labelled
from kimi_backend.types.request import CANCEL_CAUSES, EndCause, FinishReason

REFUSED = "kimi_requests_refused_total"
REFUSAL_CODES = ("INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL")
FAIL_CAUSES = tuple(cause for cause in EndCause if cause not in CANCEL_CAUSES)


def _ended(statistics: EngineStatistics, causes: tuple[EndCause, ...]) -> dict[str, float]:
    ended = statistics.totals.num_ended_by
    return {cause.value: ended[cause] for cause in causes if cause in ended}


def _finished(statistics: EngineStatistics) -> dict[str, float]:
    return {reason.value: count for reason, count in statistics.totals.num_finished.items()}


def _succeeded(statistics: EngineStatistics) -> dict[str, float]:
    finished = _finished(statistics)
    return {reason: finished[reason] for reason in ("stop", "length") if reason in finished}


REQUESTS: tuple[Metric, ...] = (
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
        "Requests that were answered with an error at once, by its code: wrong, no room, or left by their clients.",
        "code",
        REFUSAL_CODES,
        lambda s: {},
    ),
)
