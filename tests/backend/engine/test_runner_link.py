"""A runner that is away is asked again, sooner or later, and its link says why it is not there."""

import logging
from dataclasses import replace

import pytest

from kimi_backend.engine.runner_link import RunnerLink
from support.engine_runs import FakeClock
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedTarget, describe

SCRIPT = LogitScript(32)


def make_link() -> tuple[RunnerLink, ScriptedTarget, FakeClock]:
    clock = FakeClock()
    target = ScriptedTarget(replace(describe("target", SCRIPT), process_id=7), SCRIPT)
    return RunnerLink(target, "target", clock), target, clock


def pauses(link: RunnerLink, clock: FakeClock, count: int) -> list[float]:
    """Seconds between attempts that fail, each as early as may be."""
    found = []
    for _ in range(count):
        assert link.try_connect() is None
        found.append(link.next_try_s - clock.now)
        clock.now = link.next_try_s
    return found


def test_a_runner_that_is_away_is_asked_more_and_more_seldom() -> None:
    link, target, clock = make_link()
    target.unavailable = True
    assert link.problem == "runner target is loading"
    assert pauses(link, clock, 4) == [0.25, 0.5, 1.0, 1.0]
    assert link.problem == "runner target is loading: not there"
    link.note_success()
    assert pauses(link, clock, 2) == [0.25, 0.5]
    target.unavailable = False
    clock.now -= 0.01
    assert link.try_connect() is None, "too early"
    link.retry_now()
    description = link.try_connect()
    assert description is not None and not link.is_up and link.epoch is None
    link.accept(description)
    assert (link.is_up, link.epoch, link.problem, link.lost_s) == (True, 1, "", None)


def test_a_loss_is_timed_from_the_first_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    link, target, clock = make_link()
    link.accept(target.describe())
    lost_s = clock.now
    with caplog.at_level(logging.WARNING, "kimi_backend.engine"):
        for _ in range(3):
            link.lose("no reply")
            clock.now += 2
        assert [record.message for record in caplog.records] == ["runner=target is gone: no reply"]
        link.lose("another model")
    assert len(caplog.records) == 2
    assert (link.is_up, link.epoch, link.lost_s) == (False, None, lost_s)
    assert link.problem == "runner target is gone: another model"
    assert link.next_try_s == lost_s + 6 + 1.0


def test_only_the_process_that_was_met_can_be_found_dead() -> None:
    link, target, _ = make_link()
    assert link.process_id is None and not link.has_died
    link.accept(target.describe())
    assert not link.has_died
    link.report_death(6)
    assert not link.has_died
    link.report_death(7)
    assert link.has_died and link.process_id == 7
    link.lose("its process has died")
    assert not link.has_died
