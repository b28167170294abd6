"""The engine thread's clock: what a round is, and what of it is a launch."""

import pytest

from kimi_backend.engine import step_times
from kimi_backend.engine.step_times import StepTimes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock stands at its last value."""
    now = [100.0]
    monkeypatch.setattr(step_times, "perf_counter", lambda: now[-1])
    return now


def test_a_round_begins_where_the_last_one_ended_unless_there_was_nothing_to_do(clock: list[float]) -> None:
    times = StepTimes()
    seconds = []
    for is_idle in (True, False, True):
        if is_idle:
            times.rest()
        clock.append(clock[-1] + 10)
        times.start()
        clock.append(clock[-1] + 3)
        times.lap("target")
        seconds.append(times.end_round())
    assert seconds == [3, 13, 3]
    assert times.seconds["target"] == 9


def test_two_rounds_of_one_step_are_told_apart(clock: list[float]) -> None:
    times = StepTimes()
    times.start()
    seconds = []
    for lasted in (2, 5):
        clock.append(clock[-1] + lasted)
        times.lap("target")
        seconds.append(times.end_round())
    assert seconds == [2, 5]


def test_the_wait_for_a_step_begins_when_its_launch_ends(clock: list[float]) -> None:
    times = StepTimes()
    times.start()
    times.lap("schedule")
    clock.append(clock[-1] + 2)
    times.launched()
    clock.append(clock[-1] + 7)
    assert times.lap("target") == 9
    assert times.since_launch == 7


def test_what_runners_say_of_their_steps_adds_up_in_seconds() -> None:
    times = StepTimes()
    for microseconds in (250_000, 500_000):
        times.note_runner("target", microseconds)
    times.note_runner("draft", 125_000)
    assert times.runner_seconds == {"target": pytest.approx(0.75), "draft": pytest.approx(0.125)}
