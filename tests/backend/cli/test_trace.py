"""Traces: what a file says becomes requests at its times, and equal hash ids an equal prefix."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kimi_backend.cli.acceptance import acceptance_kind
from kimi_backend.cli.bench_sweep import parse_numbers
from kimi_backend.cli.bench_trace import Limits, TraceLoad, _timed
from kimi_backend.cli.main import app
from kimi_backend.cli.trace_file import Session, Turn, read_trace
from kimi_backend.cli.trace_prompts import PromptPool
from kimi_backend.errors import InvalidRequestError
from kimi_client import Completion
from kimi_client.load import RequestTimes

MOONCAKE = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}
FIRST = {"session_id": "a", "timestamp": 1000, "input_length": 20, "output_length": 4}
SECOND = {"session_id": "a", "delay": 250, "input_length": 6, "output_length": 3}
POOL = PromptPool(tuple(range(1000)), block_size=512)


def completion(*token_ids: int) -> Completion:
    return Completion(
        text="", finish_reason="length", stop_reason=None, num_output_tokens=len(token_ids), token_ids=token_ids,
        logprobs=(), statistics={},
    )  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., Path]:
    def write(*entries: Any) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
        return path

    return write


def test_lines_become_sessions_by_time(trace: Callable[..., Path]) -> None:
    sessions = read_trace(trace(MOONCAKE, FIRST, SECOND))
    turns = (Turn(input_length=20, output_length=4), Turn(input_length=6, output_length=3, delay_s=0.25))
    assert sessions == [
        Session(0.0, turns),
        Session(2.0, (Turn(input_length=700, output_length=5, hash_ids=(7, 8)),)),
    ]
    assert read_trace(trace(MOONCAKE, FIRST, SECOND), limit=1) == [Session(0.0, sessions[1].turns)]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["nonsense"], ":1: not valid JSON"),
        ([[1]], ":1: .* a JSON object is needed"),
        ([{**MOONCAKE, "timestamp": None}], ":1: timestamp is None"),
        ([{**MOONCAKE, "timestamp": -1}], ":1: timestamp is -1"),
        ([{**MOONCAKE, "input_length": 0}], ":1: input_length is 0"),
        ([{**MOONCAKE, "output_length": 2.5}], ":1: output_length is 2.5"),
        ([{**MOONCAKE, "hash_ids": ["a"]}], ":1: hash_ids is"),
        ([FIRST, {**SECOND, "delay": "soon"}], ":2: delay is 'soon'"),
        ([FIRST, {**SECOND, "text_input": "x"}], ":2: text_input in a session of several turns"),
        ([{**MOONCAKE, "text_input": 3}], ":1: text_input is"),
        ([], "no requests in it"),
    ],
)
def test_a_wrong_line_is_named(trace: Callable[..., Path], entries: list[Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_trace(trace(*entries))


def test_equal_hash_ids_are_an_equal_prefix_of_exactly_the_length() -> None:
    first = POOL.prompt(Turn(input_length=1100, output_length=1, hash_ids=(7, 8, 9)), "a")
    second = POOL.prompt(Turn(input_length=1200, output_length=1, hash_ids=(7, 8, 10)), "b")
    assert (len(first), len(second)) == (1100, 1200)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1100]
    assert POOL.prompt(Turn(input_length=64, output_length=1), "a") != POOL.prompt(
        Turn(input_length=64, output_length=1), "b"
    )
    assert len(POOL.prompt(Turn(input_length=600, output_length=1, hash_ids=(7,)), "a")) == 600


def test_a_turn_carries_what_was_said_before_and_scales_bend_lengths_and_times() -> None:
    turns = (
        Turn(input_length=40, output_length=4),
        Turn(input_length=10, output_length=6, delay_s=2.0),
    )
    load = TraceLoad(url="", sessions=[Session(4.0, turns)], fields={"seed": 5}, rate_scale=2.0, length_scale=0.5)
    (session,) = _timed(load, POOL)
    assert (session.start_s, session.turns[1].delay_s) == (2.0, 1.0)
    first, second = session.turns[0].fields([]), session.turns[1].fields([completion(901, 902)])
    assert (len(first["input_ids"]), first["max_tokens"], first["seed"]) == (20, 2, 5)
    assert second["input_ids"][:22] == [*first["input_ids"], 901, 902]
    assert (len(second["input_ids"]), second["max_tokens"], second["seed"]) == (27, 3, 6)


def test_limits_name_what_broke_them() -> None:
    times = RequestTimes((0.2, 0.3, 0.6), completion(1, 2, 3))
    assert Limits().broken_by(times) == []
    assert Limits(first_token_ms=200, inter_token_ms=199, request_ms=599).broken_by(times) == [
        "inter_token_ms",
        "request_ms",
    ]


def test_a_replay_keeps_its_times_and_a_failed_turn_ends_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    from kimi_client import ServerBusy, replay

    async def answer(client: Any, fields: dict[str, Any]) -> RequestTimes:
        await asyncio.sleep(0.02)
        if fields["text_input"] == "fails":
            raise ServerBusy("full")
        return RequestTimes((0.02,), completion(len(fields["text_input"])))

    monkeypatch.setattr(replay, "run_one", answer)

    def turn(text: str) -> replay.TimedTurn:
        return replay.TimedTurn(0.01, lambda done: {"text_input": text + "x" * len(done)})

    sessions = [
        replay.TimedSession(0.05, (turn("a"), turn("b"))),
        replay.TimedSession(0.05, (turn("fails"), turn("never"))),
    ]
    ended: list[int] = []
    result = asyncio.run(replay.replay("localhost:1", sessions, lambda: ended.append(1)))
    assert sorted(r.completion.token_ids for r in result.load.requests) == [(1,), (2,)]
    assert result.load.errors == ("ServerBusy: full",)
    assert (len(ended), result.most_running) == (3, 2)
    assert result.load.wall_s >= 0.11
    assert all(late >= 0 for late in result.late_s)


@pytest.mark.parametrize(
    ("synthetic_parts", "kind"),
    [
        ([], "real"),
        (["routing uniform", "weights dummy"], "real, of dummy weights"),
        (["acceptance length synthetic 3", "weights dummy"], "acceptance length synthetic 3"),
    ],
)
def test_where_acceptance_comes_from(synthetic_parts: list[str], kind: str) -> None:
    assert acceptance_kind(synthetic_parts) == kind


@pytest.mark.parametrize("text", ["", "1,", "a", "9", "-1"])
def test_a_sweeps_numbers_are_checked(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="--sweep-k: "):
        parse_numbers("--sweep-k", text, 0, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "x", "--compare-no-spec"], "--trace: has its own"),
        (["--sweep-k", "1"], "go together"),
        (["--sweep-k", "1", "--sweep-streams", "1", "--compare-no-spec"], "compares already"),
        (["--in-process", "--checkpoint", "x", "--trace", "y"], "go with a server"),
        (["--trace", "/nowhere"], "trace /nowhere: No such file"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        CliRunner().invoke(app, ["bench", *options], catch_exceptions=False)
