"""The times and sizes of requests, as histograms over those that ended."""

from kimi_backend.serving.metric_kinds import Metric, histogram
from kimi_backend.types.request import RequestStats

TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
COUNT_BUCKETS = (1, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
"""The buckets of tokens a request."""


def _inter_token_s(stats: RequestStats) -> float | None:
    if stats.first_token_time_s is None or stats.num_output_tokens < 2:
        return None
    return (stats.total_time_s - stats.first_token_time_s) / (stats.num_output_tokens - 1)


def _prefill_s(stats: RequestStats) -> float | None:
    return None if stats.first_token_time_s is None else stats.first_token_time_s - stats.queue_time_s


def _decode_s(stats: RequestStats) -> float | None:
    return None if stats.first_token_time_s is None else stats.total_time_s - stats.first_token_time_s


TIMES: tuple[Metric, ...] = (
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
