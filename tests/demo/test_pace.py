"""The pace of a stage: its progress by steps or by the clock, the learning rate that follows, and what it prints."""

from typing import Any

import pytest
import torch

from kimi_nano import pace as pace_module
from kimi_nano.pace import Curve, Pace, adamw, set_learning_rate, write_json
from kimi_nano.recipe import Budget


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the stage reads, to be set."""
    now = [100.0]
    monkeypatch.setattr(pace_module.time, "perf_counter", lambda: now[0])
    return now


def test_progress_by_steps_and_by_the_clock(clock: list[float]) -> None:
    by_steps, by_clock = Pace(Budget(steps=10), started=100.0), Pace(Budget(steps=0, seconds=20), started=100.0)
    by_steps.step, clock[0] = 4, 105.0
    assert (by_steps.progress, by_clock.progress, by_clock.seconds) == (0.4, 0.25, 5.0)
    by_clock.restart_clock()
    assert by_clock.progress == 0.0
    clock[0] = 200.0
    assert by_clock.progress == 1.0


def test_the_learning_rate_warms_up_stays_and_falls_to_a_fiftieth() -> None:
    pace, rates = Pace(Budget(steps=300)), {}
    for pace.step in (0, 9, 100, 200, 300):
        rates[pace.step] = pace.learning_rate(2.0, 10)
    assert rates == pytest.approx({0: 0.2, 9: 2.0, 100: 2.0, 200: 1.0, 300: 0.04})


def test_a_curve_keeps_every_row_and_prints_one_every_two_seconds(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    pace, curve = Pace(Budget(steps=10), started=100.0), Curve("target")
    for pace.step, clock[0] in ((1, 101.0), (2, 102.0), (3, 103.9), (4, 104.004)):
        curve.add(pace, loss=pace.step / 3)
    assert [(row["step"], row["seconds"]) for row in curve.rows] == [(1, 1.0), (2, 2.0), (3, 3.9), (4, 4.0)]
    assert curve.rows[0]["loss"] == 0.33333
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert printed == ["target 20% step 2 2 s loss 0.6667", "target 40% step 4 4 s loss 1.333"]


def test_only_matrices_decay() -> None:
    matrix, norm = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(3))
    optimizer = adamw([matrix, norm], 0.5)
    decays: list[tuple[list[torch.Size], float]] = [
        ([p.shape for p in group["params"]], group["weight_decay"]) for group in optimizer.param_groups
    ]
    assert decays == [([matrix.shape], 0.1), ([norm.shape], 0.0)]
    assert {(group["lr"], group["betas"], group["fused"]) for group in optimizer.param_groups} == {
        (0.5, (0.9, 0.95), False)
    }
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert len(adamw([norm], 0.5).param_groups) == 1


def test_json_is_written_with_an_indent_of_one(tmp_path: Any) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    assert (tmp_path / "a.json").read_text() == '{\n "a": 1\n}\n'
