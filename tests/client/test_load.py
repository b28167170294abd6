"""A load's summary describes the server it ran against, and its measures are exact."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_backend.cli.talk import describe_completion
from kimi_client import Chunk, Completion, ServerBusy, load, replay
from kimi_client.load import LoadResult, RequestTimes, join_results, percentiles, run_load

SYNTHETIC_PARTS = ["weights dummy", "routing uniform"]


def completion(num_output_tokens: int = 2, **statistics: Any) -> Completion:
    return Completion(
        text="a b",
        finish_reason="length",
        stop_reason="",
        num_output_tokens=num_output_tokens,
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


def test_a_line_about_a_reply_has_its_speed_and_acceptance() -> None:
    assert describe_completion(completion(seed=1)) == "2 tokens, finish: length, seed 1"
    told = completion(seed=1, total_time_s=0.5, speculative_decoding={"mean_acceptance_length": 2.5})
    assert describe_completion(told) == "2 tokens, 4.0 tokens/s, acceptance length 2.50, finish: length, seed 1"


def rounds(number: int, drafted: list[int], accepted: list[int]) -> dict[str, Any]:
    return {
        "num_spec_steps": number,
        "num_draft_tokens": sum(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "drafted_per_position": drafted,
        "accepted_per_position": accepted,
    }


FIRST = completion(
    3,
    speculative_decoding=rounds(4, [4, 2], [3, 1]),
    speculation_by_proposer={"eagle3": rounds(3, [3], [2]), "lookup": None},
    speculation_policy="fixed",
    num_draft_tokens_histogram=[1, 3],
)
SECOND = completion(
    1,
    speculative_decoding=rounds(2, [2, 2, 0], [1, 1, 0]),
    speculation_policy="adaptive",
    num_draft_tokens_histogram=[0, 2, 2],
)


def in_ms(p50: float, p90: float, p95: float, p99: float) -> dict[str, float]:
    return {"p50": p50, "p90": p90, "p95": p95, "p99": p99}


def test_loads_are_joined_and_summed_up() -> None:
    loads = [
        LoadResult(3, 2.0, (RequestTimes((0.1, 0.2, 0.4), FIRST),), ("ServerBusy: full",)),
        LoadResult(3, 0.5, (RequestTimes((0.3,), SECOND),)),
    ]
    assert join_results(loads).summary() == {
        "concurrency": 3,
        "requests": 2,
        "errors": 1,
        "wall_s": 2.5,
        "output_tokens_per_second": 1.6,
        "requests_per_second": 0.8,
        "first_token_ms": in_ms(200, 280, 290, 298),
        "inter_token_ms": in_ms(150, 150, 150, 150),
        "inter_chunk_ms": in_ms(150, 190, 195, 199),
        "request_ms": in_ms(350, 390, 395, 399),
        "speculation": {
            "rounds": 6,
            "acceptance_length": 2.0,
            "acceptance_rate": 0.6,
            "acceptance_per_position": [0.6667, 0.5, None],
        },
        "speculation_by_proposer": {
            "eagle3": {
                "rounds": 3,
                "acceptance_length": 1.6667,
                "acceptance_rate": 0.6667,
                "acceptance_per_position": [0.6667],
            }
        },
        "policy": {"name": "adaptive, fixed", "shares": [0.125, 0.625, 0.25]},
    }


def test_a_load_without_speculation_says_none_of_it() -> None:
    told = summary(completion(seed=1), completion(speculation_policy="fixed", num_draft_tokens_histogram=[0]))
    assert (told["speculation"], told["speculation_by_proposer"], told["policy"]) == (None, {}, None)
    assert percentiles([]) is None


class Answers:
    """Answers requests one turn of the loop later, fails those that say so, and counts how many run at once."""

    def __init__(self) -> None:
        self.num_running = self.most_running = 0

    async def run_one(self, client: Any, fields: dict[str, Any]) -> RequestTimes:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0)
        self.num_running -= 1
        if fields.get("fails"):
            raise ServerBusy("full")
        return RequestTimes((0.1,), completion(seed=fields["seed"]))


def test_a_load_keeps_its_streams_running_and_goes_on_behind_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, ended = Answers(), list[int]()
    monkeypatch.setattr(load, "run_one", answers.run_one)
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=iter([5.0, 7.5]).__next__))
    requests = [{"seed": 0, "fails": True}, *({"seed": seed} for seed in range(1, 6))]
    result = asyncio.run(run_load("localhost:1", requests, 3, lambda: ended.append(1)))
    assert (result.concurrency, result.wall_s, answers.most_running, len(ended)) == (3, 2.5, 3, 6)
    assert sorted(each.completion.statistics["seed"] for each in result.requests) == [1, 2, 3, 4, 5]
    assert result.errors == ("ServerBusy: full",)


class TwoChunks:
    """A stream."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        for chunk in (Chunk("a", 1), Chunk("b", 2, finish_reason="stop")):
            self.chunks.append(chunk)
            yield chunk


def test_a_request_is_timed_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=iter([5.0, 5.25, 6.0]).__next__))
    client: Any = SimpleNamespace(stream=lambda **_: TwoChunks())
    times = asyncio.run(load.run_one(client, {}))
    assert (times.first_token_s, times.total_s, times.inter_token_s) == (0.25, 1.0, 0.375)
    assert (times.completion.text, times.completion.finish_reason) == ("ab", "stop")


def test_a_replay_waits_for_a_sessions_time_and_each_turns_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(replay, "run_one", Answers().run_one)
    monkeypatch.setattr(replay, "asyncio", SimpleNamespace(sleep=sleep, gather=asyncio.gather))
    monkeypatch.setattr(replay, "time", SimpleNamespace(perf_counter=iter([10.0, 10.25, 12.5, 20.0]).__next__))
    turns = tuple(replay.TimedTurn(delay_s, lambda done: {"seed": len(done)}) for delay_s in (0.0, 0.75))
    result = asyncio.run(replay.replay("localhost:1", [replay.TimedSession(2.0, turns)]))
    assert slept == [1.75, 0.0, 0.75]
    assert (result.late_s, result.load.wall_s, result.load.concurrency, result.most_running) == ((0.5,), 10.0, 1, 1)
    assert [each.completion.statistics["seed"] for each in result.load.requests] == [0, 1]
