"""Measurements whose runners are in their own process, or whose server is somebody else's: run over models that answer
at once, and over made-up counters."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from rich.console import Console

import cpu_steps
import grammar_cost
import in_process_rounds
import nano_costs
import unary_throughput
from engine_overhead import InstantDraft, InstantTarget
from kimi_backend.config.settings import ServingSettings
from kimi_backend.runners.load import loading
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.grammar import JsonSchema
from kimi_backend.types.plan import DraftPlan, TargetPlan
from serving_suite.server_metrics import ServerCounters
from serving_suite.side_by_side import NANO, ServedCase
from steady_plans import steady_plans

VOCAB_SIZE = 4096


def instant_pair(*_: Any) -> tuple[InstantTarget, InstantDraft]:
    return InstantTarget(4, 0, VOCAB_SIZE), InstantDraft(4, 0, VOCAB_SIZE)


def test_rounds_are_timed_for_each_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_pair", instant_pair)
    settings = ServingSettings(checkpoint=str(NANO), max_num_seqs=4, speculation_policy="fixed")
    fields = {"max_tokens": 8, "ignore_eos": True, "num_speculative_tokens": 2}
    found = in_process_rounds.rounds_in_process(settings, [1, 3], fields, "x = 1")
    assert found.keys() == {1, 3}
    assert all(0 < milliseconds < 1e4 for milliseconds in found.values())
    assert fields["num_speculative_tokens"] == 2


def test_the_load_that_counts_is_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(in_process_rounds, "_run", lambda engine, count, *_: asked.append(count))
    told = iter([({"target": 1.0, "draft": 2.0}, 10), ({"target": 1.5, "draft": 2.25}, 14)])

    def statistics() -> Any:
        assert len(asked) in (1, 2)
        seconds, steps = next(told)
        return SimpleNamespace(step_seconds=seconds, num_steps=steps)

    engine: Any = SimpleNamespace(statistics=statistics)
    assert in_process_rounds._measure(engine, 3, (1,), 2, {}) == pytest.approx(187.5)
    assert asked == [3, 3]


def test_steps_on_a_cpu_are_recorded_and_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[ServingSettings] = []
    asked: list[int] = []

    def fastest_ms(target: Any, draft: Any, plans: list[Any], repeats: int) -> list[float]:
        asked.append(repeats)
        return [2.0 if isinstance(plan, TargetPlan) else 3.0 for plan in plans]

    monkeypatch.setattr(cpu_steps, "fastest_ms", fastest_ms)
    monkeypatch.setattr(cpu_steps, "load_pair", lambda settings: (made.append(settings), instant_pair())[1])
    monkeypatch.setattr(sys, "argv", ["cpu_steps", "--k", "0", "2", "--max-tokens", "8", "--repeats", "2"])
    cpu_steps.main()
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0] for line in lines] == ["| 0", "| 2"]
    assert [line[1:] for line in lines] == [["2.00", "- |"], ["2.00", "3.00 |"]]
    assert asked == [2, 2]
    assert (made[0].speculation_policy, made[0].max_speculative_tokens, made[0].device) == ("fixed", 2, "cpu")


def test_of_each_plan_the_fastest_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    target_plan, draft_plan = steady_plans(1, 2)
    clock = iter([0.0, 0.005, 1.0, 1.003, 2.0, 2.002, 3.0, 3.004])
    monkeypatch.setattr(cpu_steps, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    ran: list[TargetPlan | DraftPlan] = []
    target, draft = instant_pair()
    plans: list[TargetPlan | DraftPlan] = [target_plan, draft_plan]
    recorded: Any = (cpu_steps.Recorded(runner, ran) for runner in (target, draft))  # type: ignore[arg-type]
    assert cpu_steps.fastest_ms(*recorded, plans, 2) == pytest.approx([2.0, 3.0])
    assert ran == plans * 2


def test_what_a_grammar_costs_is_told_for_each_act(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grammar_cost, "REPEATS", 2)
    nano = load_tokenizer(NANO)
    form = JsonSchema(json.dumps(grammar_cost.SCHEMA))
    grammar_cost.measure("nano", nano, form, nano.encode(grammar_cost.TEXT)[:6])
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("nano: first grammar compiled after ")
    assert [line[2:26].rstrip() for line in others] == [
        "a row's mask",
        "a window of 4 rows",
        "going on behind a token",
    ]


def served_case() -> ServedCase:
    ports = SimpleNamespace(metrics=2, grpc=1)
    server: Any = SimpleNamespace(ports=ports)
    return ServedCase("", server, 3)


def test_the_hosts_seconds_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = iter([ServerCounters(), ServerCounters(10, 5, 5, 1, 1), ServerCounters(30, 9, 9, 4, 6)])
    loads = []

    async def run_load(url: str, requests: list[dict[str, Any]], streams: int) -> Any:
        loads.append((url, len(requests), streams, requests[0]["max_tokens"], requests[0]["temperature"]))
        return SimpleNamespace(errors=())

    monkeypatch.setattr(nano_costs, "METRICS_INTERVAL_S", 0)
    monkeypatch.setattr(nano_costs, "read_counters", lambda port: next(counters))
    monkeypatch.setattr(nano_costs, "run_load", run_load)
    assert nano_costs.host_seconds(served_case(), 2) == pytest.approx(8 / 20)
    assert loads == [("localhost:1", 6, 2, 128, 0.0)] * 3


def test_costs_that_were_not_kept_end_it_and_others_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Any = SimpleNamespace(to_json=lambda: '{"ms": 1.23456, "rows": 3}')
    monkeypatch.setattr(nano_costs, "newest_costs", lambda role, fields: ("path", kept))
    assert nano_costs.kept_costs("draft") == {"ms": 1.235, "rows": 3}
    monkeypatch.setattr(nano_costs, "newest_costs", lambda role, fields: None)
    with pytest.raises(SystemExit, match="no costs of the draft were kept"):
        nano_costs.kept_costs("draft")


def test_the_unary_models_share_is_the_median_of_all_turns_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    unary = iter([1.0, 50.0, 90.0, 70.0])

    async def run_streams(*_: Any) -> tuple[float, dict[int, str]]:
        return 100.0, {0: "a"}

    async def run_unary(*_: Any) -> tuple[float, dict[int, str]]:
        return next(unary), {0: "a"}

    monkeypatch.setattr(unary_throughput, "run_streams", run_streams)
    monkeypatch.setattr(unary_throughput, "run_unary", run_unary)
    given = argparse.Namespace(requests=2, max_tokens=5, rounds=3, concurrency=1)
    report = unary_throughput.measure("", given, Console(quiet=True))
    assert report["share"] == pytest.approx(0.7)
    assert [turn["infer"] for turn in report["turns"]] == [50.0, 90.0, 70.0]

    async def other(*_: Any) -> tuple[float, dict[int, str]]:
        return 1.0, {0: "b"}

    monkeypatch.setattr(unary_throughput, "run_unary", other)
    with pytest.raises(RuntimeError, match="other texts"):
        unary_throughput.measure("", given, Console(quiet=True))


def test_the_unary_models_requests_and_their_tensors() -> None:
    requests = unary_throughput.make_requests(2, 5)
    assert [(request["seed"], request["max_tokens"], request["ignore_eos"]) for request in requests] == [
        (0, 5, True),
        (1, 5, True),
    ]
    tensors = {name: unary_throughput._tensor(name, value) for name, value in requests[1].items()}
    assert {tuple(tensor.shape()) for tensor in tensors.values()} == {(1, 1)}
    assert tensors["seed"].datatype() == "UINT64"


@pytest.mark.parametrize(("share", "status"), [(0.9, 0), (0.89, 1)])
def test_the_unary_models_verdict(share: float, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[ServingSettings] = []
    done: list[str] = []
    server = SimpleNamespace(
        start=lambda: done.append("start"),
        wait_until_ready=lambda: done.append("ready"),
        stop=lambda: done.append("stop"),
        ports=SimpleNamespace(grpc=1),
    )
    monkeypatch.setattr(unary_throughput, "make_server", lambda settings, **_: (made.append(settings), server)[1])
    monkeypatch.setattr(unary_throughput, "measure", lambda url, *_: {"share": share, "url": url})
    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["unary", "--checkpoint", str(NANO), "--json", str(file)])
    assert unary_throughput.main() == status
    assert done == ["start", "ready", "stop"]
    assert json.loads(file.read_text()) == {"share": share, "url": "localhost:1"}
    assert (made[0].draft, made[0].unary) == (str(NANO / "draft"), "true")
