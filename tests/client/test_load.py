"""A load's summary describes the server it ran against."""

from typing import Any

from kimi_backend.cli.talk import describe_completion
from kimi_client import Completion
from kimi_client.load import LoadResult, RequestTimes

SYNTHETIC_PARTS = ["weights dummy", "routing uniform"]


def completion(**statistics: Any) -> Completion:
    return Completion(
        text="a b",
        finish_reason="length",
        stop_reason="",
        num_output_tokens=2,
        token_ids=(),
        logprobs=(),
        statistics=statistics,
    )


def summary(*completions: Completion) -> dict[str, Any]:
    requests = tuple(RequestTimes(chunk_times_s=(0.1, 0.2), completion=each) for each in completions)
    return LoadResult(concurrency=1, wall_s=0.2, requests=requests).summary()


def test_what_was_not_real_is_repeated_once() -> None:
    synthetic = completion(pretences=SYNTHETIC_PARTS, seed=1)
    assert summary(synthetic, synthetic)["pretences"] == sorted(SYNTHETIC_PARTS)
    assert describe_completion(synthetic).endswith("weights dummy, routing uniform")


def test_a_real_server_says_nothing_of_it() -> None:
    assert "pretences" not in summary(completion(seed=1))
    assert describe_completion(completion(seed=1)).endswith("seed 1")
