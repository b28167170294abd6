"""The log judges a draft right after the start: over the real engine and scripted runners."""

import logging

import pytest

from kimi_backend.engine.engine import Engine
from kimi_backend.engine.request_output import DeltaSink
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.serving.start_probe import NUM_PROMPTS, NUM_TOKENS, warn_of_wrong_draft
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import GenerateRequest
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

SCRIPT = LogitScript(32)
COMMAND = "kimi probe TARGET --draft DRAFT"


class Letters:
    """The part of a tokenizer that the probe needs."""

    def encode(self, text: str) -> list[int]:
        return [8 + ord(letter) % 24 for letter in text]


@pytest.mark.parametrize(("quality", "warns"), [(1.0, False), (0.0, True)], ids=["right", "wrong"])
def test_a_draft_that_does_not_fit_is_said_with_the_command_that_mends_it(
    quality: float, warns: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = ScriptedDraft(describe("draft", SCRIPT), SCRIPT, quality)
    settings = SchedulerSettings(proposer=Proposer.LOOKUP_EAGLE3)
    engine = Engine(ScriptedTarget(describe("target", SCRIPT), SCRIPT), draft, settings=settings)
    asked: list[GenerateRequest] = []

    def submit(request: GenerateRequest, sink: DeltaSink) -> object:
        asked.append(request)
        return Engine.submit(engine, request, sink)

    monkeypatch.setattr(engine, "submit", submit)
    engine.start()
    with caplog.at_level(logging.INFO, "kimi_backend.serving"):
        warn_of_wrong_draft(engine, Letters(), COMMAND)  # type: ignore[arg-type]
    totals = engine.statistics().totals
    assert {request.proposer for request in asked} == {Proposer.EAGLE3}, "a text's repetitions say nothing of the draft"
    engine.stop()
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == warns
    assert all("near chance" in message and COMMAND in message for message in said)
    assert totals.num_output_tokens == NUM_PROMPTS * NUM_TOKENS


def test_an_engine_without_a_runner_is_not_scored(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(ScriptedTarget(describe("target", SCRIPT), SCRIPT), None)
    engine.start()
    engine.stop()
    with caplog.at_level(logging.INFO, "kimi_backend.serving"):
        warn_of_wrong_draft(engine, Letters(), COMMAND)  # type: ignore[arg-type]
    assert "was not scored" in caplog.text
