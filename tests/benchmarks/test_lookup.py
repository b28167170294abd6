"""The comparison of proposers: what a pair in this process and a server's responses give, as cells and a verdict."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from kimi_backend.config.settings import ServingSettings
from kimi_backend.serving.responses import statistics_json
from kimi_backend.types.request import FinishReason, GenerateRequest, RequestStats, SpeculationStats, TokenDelta
from kimi_client import Completion
from lookup import Bench
from lookup_suite import in_process
from lookup_suite.cells import PROPOSERS, Reply, Turns, acceptance, cells_of, comparison, said
from lookup_suite.loads import LoadPrompt
from lookup_suite.served import reply_of
from serving_suite.side_by_side import NANO

ROUNDS = SpeculationStats(
    num_spec_steps=4,
    num_draft_tokens=8,
    num_accepted_draft_tokens=5,
    drafted_per_position=(4, 3, 1),
    accepted_per_position=(3, 2, 0),
)
DEEPER = SpeculationStats(
    num_spec_steps=2,
    num_draft_tokens=8,
    num_accepted_draft_tokens=7,
    drafted_per_position=(2, 2, 2, 2),
    accepted_per_position=(2, 2, 2, 1),
)


def test_a_pair_in_this_process_writes_one_text_whoever_proposes() -> None:
    settings = ServingSettings(
        checkpoint=str(NANO),
        draft=str(NANO / "draft"),
        device="cpu",
        max_model_len=128,
        kv_tokens=1024,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        proposer="lookup+eagle3",
        speculation_policy="fixed",
    )
    prompts = [LoadPrompt([*range(300, 312)] * 3, []), LoadPrompt([*range(500, 509)], []), LoadPrompt([7] * 12, [])]
    with in_process.in_process(settings) as send:
        bench = Bench(send, Namespace(streams=2, max_tokens=8, turns=2, warm_up=1))
        cells, compared = bench.measure("records", prompts, 0.0)
    plain, eagle3, lookup, both = cells
    assert compared["texts_equal"] and compared["load"] == "records"
    assert [cell["proposer"] for cell in cells] == list(PROPOSERS)
    assert plain["tokens_a_verify"] == 1 and plain["rounds"] is None
    assert set(eagle3["by_proposer"]) == {"eagle3"} and set(lookup["by_proposer"]) == {"lookup"}
    assert set(both["by_proposer"]) == {"eagle3", "lookup"} and both["tokens_a_verify"] > 1
    assert all(len(cell["turns"]) == 2 and cell["num_prompts"] == 3 for cell in cells)


@dataclass
class HeldEngine:
    """An engine whose latest request ends first, once so many are live or all have come."""

    most_live: int
    num_requests: int
    error: str | None = None
    live: list[tuple[GenerateRequest, Callable[[TokenDelta], None]]] = field(default_factory=list)
    seen: list[GenerateRequest] = field(default_factory=list)

    def submit(self, request: GenerateRequest, sink: Callable[[TokenDelta], None]) -> None:
        self.live.append((request, sink))
        self.seen.append(request)
        assert len(self.live) <= self.most_live
        if len(self.live) == self.most_live:
            self.end()
        while len(self.seen) == self.num_requests and self.live:
            self.end()

    def end(self) -> None:
        request, sink = self.live.pop()
        number = int(request.request_id)
        sink(TokenDelta(request_id=request.request_id, token_ids=(number,)))
        reason = FinishReason.ERROR if self.error else FinishReason.LENGTH
        sink(
            TokenDelta(
                request_id=request.request_id,
                token_ids=(10 * number,),
                finish_reason=reason,
                error=self.error,
                stats=stats(),
            )
        )


def stats(**changes: Any) -> RequestStats:
    values: dict[str, Any] = {
        "num_prompt_tokens": 5,
        "num_cached_tokens": 0,
        "num_output_tokens": 11,
        "max_tokens": 11,
        "queue_time_s": 0.0,
        "first_token_time_s": 0.1,
        "total_time_s": 0.2,
        "num_preemptions": 0,
        "seed": 3,
        "speculation": ROUNDS,
        "speculation_by_proposer": {"eagle3": ROUNDS},
        "num_draft_tokens_histogram": (2, 1, 2, 1),
    }
    return RequestStats(**values | changes)


def requests(count: int) -> list[dict[str, Any]]:
    """Requests as the comparison sends them."""
    sent: list[dict[str, Any]] = []

    def send(requests: Sequence[dict[str, Any]], streams: int) -> tuple[list[Reply], float]:
        sent.extend(requests)
        return [], 0.0

    Bench(send, Namespace(streams=2, max_tokens=9)).send([LoadPrompt([n, n], []) for n in range(count)], "lookup", 0.5)
    return sent


def test_so_many_requests_run_at_once_and_replies_come_in_their_order() -> None:
    engine = HeldEngine(most_live=2, num_requests=5)
    replies, rate = in_process._send(engine, requests(5), 2)  # type: ignore[arg-type]
    assert [reply.token_ids for reply in replies] == [(n, 10 * n) for n in range(5)]
    assert replies[0].num_verifies == 6 and rate > 0
    sent = engine.seen[3]
    assert (sent.prompt_token_ids, sent.proposer, sent.cache_salt is None) == ((3, 3), "lookup", False)
    sampling = sent.sampling
    assert (sampling.seed, sampling.max_tokens, sampling.temperature, sampling.ignore_eos) == (3, 9, 0.5, True)


def test_a_request_that_fails_ends_the_comparison() -> None:
    with pytest.raises(SystemExit, match="no weights"):
        in_process._send(HeldEngine(2, 2, error="no weights"), requests(2), 2)  # type: ignore[arg-type]


def test_a_servers_response_says_what_the_engine_does() -> None:
    values = json.loads(json.dumps(statistics_json(stats())))
    reply = reply_of(Completion("text", "length", None, 2, (8, 9), (), values))
    assert (reply.token_ids, reply.num_verifies) == ((8, 9), 6)
    assert acceptance([reply.rounds]) == acceptance([reply.by_proposer["eagle3"]]) == acceptance([ROUNDS])
    plain = statistics_json(stats(speculation=None, speculation_by_proposer={}))
    assert reply_of(Completion("text", "length", None, 2, (8, 9), (), plain)).rounds is None


def reply(rounds: SpeculationStats | None, text: tuple[int, ...] = (1, 2, 3, 4)) -> Reply:
    return Reply(text, rounds, {} if rounds is None else {"eagle3": rounds}, 2)


def test_each_position_is_divided_by_the_rounds_that_proposed_it() -> None:
    assert acceptance([ROUNDS, None, DEEPER]) == {
        "rounds": 6,
        "acceptance_length": 3.0,
        "acceptance_rate": 0.75,
        "acceptance_per_position": [0.8333, 0.8, 0.6667, 0.5],
    }
    assert acceptance([None]) is None


def four(rates: list[float], text: tuple[int, ...] = (1, 2, 3, 4)) -> list[Turns]:
    """The proposers' turns: both have these rates, and this text in the last turn."""
    others = {"none": ([50.0] * 3, None), "eagle3": ([100.0, 80.0, 120.0], ROUNDS), "lookup": ([90.0] * 3, DEEPER)}
    replies = [[reply(DEEPER)], [reply(DEEPER)], [reply(DEEPER, text)]]
    alone = [Turns(name, rates, [[reply(rounds)]] * 3) for name, (rates, rounds) in others.items()]
    return [*alone, Turns("lookup+eagle3", rates, replies)]


def test_a_cell_is_of_all_turns() -> None:
    cells = cells_of(four([99.0, 88.0, 111.0]))
    assert [cell["tokens_per_s"] for cell in cells] == [50, 100, 90, 99]
    assert cells[3]["turns"] == [99, 88, 111]
    assert cells[1]["tokens_a_verify"] == 1.5 and cells[1]["rounds"] == cells[1]["by_proposer"]["eagle3"]
    assert cells[1]["rounds"]["rounds"] == 12
    assert all(cell["texts_equal"] for cell in cells)
    assert [cell["texts_equal"] for cell in cells_of(four([9.0, 9.0, 9.0], (1, 2, 3, 5)))] == [True, True, True, False]


def compared(rates: list[float], text: tuple[int, ...] = (1, 2, 3, 4), **load: Any) -> dict[str, Any]:
    turns = four(rates, text)
    return {"load": "edit", "temperature": 0.0} | load | comparison(turns, cells_of(turns))


def test_both_are_compared_with_the_better_one_by_turn() -> None:
    """Lookup is the better one by the odd turns, the draft by the even ones: each is the peer where it did not win."""
    found = compared([99.0, 88.0, 111.0])
    assert found["best"] == ["eagle3", "lookup"]
    assert found["to_best"][0] == round(99 / 90, 3) and found["first_turn_to_best"] == round(99 / 90, 3)
    assert found["acceptance_by_eagle3"] == 2.0


def test_the_verdict_names_what_is_missed() -> None:
    good, slow = compared([100.0, 100.0, 125.0]), compared([70.0] * 3, load="records", temperature=1.0)
    assert said([good]).splitlines() == [
        "Both: At least 0.97 of the better of both. Every text the same.",
        "Edits: 2.0 times EAGLE3's acceptance length, at least the bar of 1.3.",
    ]
    assert "MISSES the bar of 0.97 at records at temperature 1; beyond chance at records" in said([good, slow])
    few = good | {"acceptance_by_eagle3": 1.29}
    assert "Edits: 1.29 times EAGLE3's acceptance length, MISSES the bar of 1.3." in said([few])
    assert "Edits" not in said([good | {"temperature": 1.0}]) and "Edits" not in said([slow])
    assert "TEXTS DIFFER at edit at temperature 0." in said([compared([100.0] * 3, (1, 2, 3, 5))])
