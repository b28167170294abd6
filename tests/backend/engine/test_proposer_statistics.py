"""A reply, the engine's statistics, metrics and the log have the same numbers of each proposer."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from kimi_backend.engine.engine import Engine
from kimi_backend.engine.periodic_summary import _describe_proposers
from kimi_backend.engine.statistics import EngineState, OutputTotals, take_statistics
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.serving.metric_table import METRICS
from kimi_backend.serving.responses import statistics_json
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenOrigin
from support.recording_client import RecordingClient
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe
from support.waiting import PATIENCE_S

SCRIPT = LogitScript(32)


def test_origins_statistics_metrics_and_log_agree() -> None:
    engine = Engine(
        ScriptedTarget(describe("target", SCRIPT), SCRIPT),
        ScriptedDraft(describe("draft", SCRIPT), SCRIPT, 0.7),
        settings=SchedulerSettings(proposer=Proposer.LOOKUP_EAGLE3, lookup_min_match=2),
    )
    engine.start()
    engine.wait_until_ready(PATIENCE_S)
    clients = {"eagle3": RecordingClient(), "lookup": RecordingClient()}
    for name, client in clients.items():
        sampling = SamplingParams(seed=3, max_tokens=90, allowed_token_ids=(6, 7) if name == "lookup" else ())
        engine.submit(
            GenerateRequest(
                request_id=name,
                prompt_token_ids=(6, 7, 6, 8) * 4,
                sampling=sampling,
                proposer=Proposer(name),
                return_token_origins=True,
            ),
            client,
        )
    for client in clients.values():
        client.wait()
    statistics = engine.statistics()
    assert statistics.lookup_bytes == 0, "an index is given back when its request ends"
    engine.drain(PATIENCE_S)

    by_proposer = statistics.totals.speculation_by_proposer
    for (name, client), origin in zip(clients.items(), (TokenOrigin.DRAFT, TokenOrigin.LOOKUP), strict=True):
        origins = [origin for delta in client.deltas for origin in delta.token_origins]
        stats = client.deltas[-1].stats
        assert stats is not None
        assert (stats.proposer, stats.speculation_by_proposer) == (name, {name: by_proposer[name]})
        assert stats.speculation == by_proposer[name]
        assert set(origins) == {TokenOrigin.TARGET, origin}
        assert 5 < origins.count(origin) <= by_proposer[name].num_accepted_draft_tokens <= origins.count(origin) + 7

    stats = clients["lookup"].deltas[-1].stats
    assert stats is not None
    values = statistics_json(stats)["speculation_by_proposer"]
    assert values["lookup"]["mean_acceptance_length"] == by_proposer["lookup"].mean_acceptance_length
    metrics = {metric.name: metric.read(statistics) for metric in METRICS if metric.read is not None}
    for name, field in (
        ("spec_decode_num_drafts_by_proposer_total", "num_spec_steps"),
        ("spec_decode_num_draft_tokens_by_proposer_total", "num_draft_tokens"),
        ("spec_decode_num_accepted_tokens_by_proposer_total", "num_accepted_draft_tokens"),
    ):
        assert metrics[name] == {proposer: getattr(rounds, field) for proposer, rounds in by_proposer.items()}
    said = _describe_proposers(by_proposer, {})
    assert f"lookup=(acceptance_length={by_proposer['lookup'].mean_acceptance_length:.2f}" in said
    assert "lookup=(" not in _describe_proposers({"eagle3": by_proposer["eagle3"]}, {})


def test_a_snapshot_has_each_number_from_its_place() -> None:
    """Every number is another, and what is submitted and not yet seen by the scheduler waits too."""
    policy = SimpleNamespace(num_chosen_tokens=5)
    scheduler = SimpleNamespace(is_drafting=True, settings=SchedulerSettings(), policy=policy, num_preemptions=19)
    scheduler.running, scheduler.waiting = [None] * 11, [None] * 13
    core: Any = SimpleNamespace(scheduler=scheduler, num_steps=23, geometry=SimpleNamespace(synthetic_parts=("x",)))
    core.times = SimpleNamespace(seconds={"plan": 1.0}, runner_seconds={"target": 2.0})
    pools = [SimpleNamespace(num_held=held, num_blocks=held + 50) for held in (31, 37)]
    found = []
    for draft_pool in (pools[1], None):
        core.kv = SimpleNamespace(target_pool=pools[0], draft_pool=draft_pool)
        found.append(take_statistics(EngineState.READY, "why", 100, core, OutputTotals()))
    with_draft = {
        "is_speculating": True,
        "speculation_policy": "fixed",
        "num_chosen_draft_tokens": 5,
        "num_running": 11,
        "num_waiting": 113,
        "num_preemptions": 19,
        "num_steps": 23,
        "step_seconds": {"plan": 1.0},
        "runner_seconds": {"target": 2.0},
        "target_blocks_held": 31,
        "target_blocks_total": 81,
        "draft_blocks_held": 37,
        "draft_blocks_total": 87,
        "synthetic_parts": ("x",),
        "problem": "why",
    }
    values = [asdict(statistics) for statistics in found]
    assert values[0].items() >= with_draft.items()
    assert values[1].items() >= (with_draft | {"draft_blocks_held": 0, "draft_blocks_total": 0}).items()
    before = take_statistics(EngineState.STARTING, None, 3, None, OutputTotals())
    numbers = {name: value for name, value in asdict(before).items() if value and name not in ("state", "totals")}
    assert numbers == {"num_waiting": 3}
