"""A reply, the engine's statistics, metrics and the log have the same numbers of each proposer."""

from kimi_backend.engine.engine import Engine
from kimi_backend.engine.periodic_summary import _describe_proposers
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
