import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_backend.engine.emitter import Emitter, OutputTotals
from kimi_backend.engine.periodic_summary import PERIOD_S, PeriodicSummary
from kimi_backend.engine.request_output import NoText, RequestOutput
from kimi_backend.types.request import GenerateRequest, SamplingParams, SpeculationStats
from support.engine_runs import EngineHarness, FakeClock
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe
from support.waiting import wait_for

SCRIPT = LogitScript(32)


def test_rates_are_those_of_the_period(caplog: pytest.LogCaptureFixture) -> None:
    clock, emitter = FakeClock(), Emitter(lambda sequence, finish: None)
    harness = EngineHarness(
        ScriptedTarget(describe("target", SCRIPT), SCRIPT), ScriptedDraft(describe("draft", SCRIPT), SCRIPT, 1.0)
    )
    summary = PeriodicSummary(clock)
    emitter.start()
    harness.core._outputs._emit = emitter.put
    for uid in range(2):
        request = GenerateRequest(
            request_id=str(uid),
            prompt_token_ids=(1, 2),
            sampling=SamplingParams(seed=1, max_tokens=21, temperature=0),
            num_speculative_tokens=3,
        )
        outcome = harness.add(request)
        emitter.register(RequestOutput(outcome.sequence, NoText(), lambda delta: None))
        while harness.step():
            pass
        wait_for(lambda: not emitter.num_live, "the emitter keeps a sequence whose last output it never got")
        with caplog.at_level(logging.INFO, "kimi_backend.engine"):
            summary.log_when_due(harness.core, emitter)
            clock.now += PERIOD_S
            summary.log_when_due(harness.core, emitter)
    emitter.close()
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    rounds = "acceptance_length=4.00 acceptance_rate=1.00 kept=0%/0%/0%/100% by_position=1.00/1.00/1.00"
    assert lines[0].startswith(f"running=0 waiting=0 tokens_per_s=2.1 {rounds} target_blocks=0/256")


def test_a_draft_whose_tokens_are_no_longer_taken_is_warned_of_and_so_is_what_is_made_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    summary = PeriodicSummary(clock)
    core: Any = SimpleNamespace(
        scheduler=SimpleNamespace(running=[1], waiting=[1, 2], num_preemptions=7),
        kv=SimpleNamespace(target_pool=SimpleNamespace(num_held=3, num_blocks=5)),
        geometry=SimpleNamespace(synthetic_parts=("a", "b")),
    )
    said = []
    for drafted, accepted in ((48, 0), (1048, 0), (2048, 600)):
        rounds = SpeculationStats(drafted_per_position=(drafted,), accepted_per_position=(accepted,))
        emitter: Any = SimpleNamespace(
            totals=lambda rounds=rounds: OutputTotals(speculation_by_proposer={"eagle3": rounds})
        )
        clock.now += PERIOD_S
        with caplog.at_level(logging.INFO, "kimi_backend.engine"):
            summary.log_when_due(core, emitter)
        said.append([(record.levelname, record.message) for record in caplog.records])
        caplog.clear()
    line = "running=1 waiting=2 tokens_per_s=0.0 acceptance_length=- target_blocks=3/5 preemptions=7"
    assert all(records[0] == ("INFO", f"{line} synthetic='a' synthetic='b'") for records in said)
    assert [[level for level, _ in records[1:]] for records in said] == [["WARNING"], [], ["INFO"]]
    assert "near chance" in said[0][1][1] and "as before again" in said[2][1][1]
