"""The policy's measurement: neighbours in time are compared, and a bar that is missed is named."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from serving_suite import policy_rows
from speculation_policy import joined


@dataclass
class ScriptedCase:
    """A case whose turn's rate is known from the number of the turn."""

    name: str
    rate_of: Callable[[int], float]
    rates: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    verifies: list[int] = field(default_factory=lambda: [1])
    requests: list[range] = field(default_factory=list)

    def run(self, temperature: float, requests: range, streams: int, max_tokens: int) -> None:
        self.rates.append(self.rate_of(len(self.rates)))
        self.texts = [str(requests)]
        self.requests.append(requests)


@pytest.fixture(autouse=True)
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that cases rested; none passes."""
    seconds: list[float] = []
    monkeypatch.setattr(policy_rows.time, "sleep", seconds.append)
    return seconds


def measured(*rates_of: Callable[[int], float]) -> tuple[dict[str, Any], list[ScriptedCase]]:
    """Cases named by their order; the last one is the adaptive one."""
    cases = [ScriptedCase(str(number), rate_of) for number, rate_of in enumerate(rates_of)]
    return policy_rows.measure(cases, 0.0, 4, Namespace(turns=8, max_tokens=1)), cases


def load(turn: int) -> float:
    return 1 + 0.5 * (turn % 3)


def test_neighbours_are_compared_so_load_moves_both() -> None:
    found, _ = measured(lambda turn: 80 * load(turn), lambda turn: 100 * load(turn), lambda turn: 98 * load(turn))
    assert found["best"] == ["1"] and found["to_best"] == [0.98, 0.98, 0.98] and found["meets_bar"]
    assert found["to_no_draft"] == 1.225


def test_luck_makes_no_peer() -> None:
    """Two equal cases, each ahead in every other turn: the best by some turns is judged by others."""
    cases = [ScriptedCase(str(n), lambda turn, n=n: 100.0 + 5 * (turn % 2 == n)) for n in (0, 1)]  # type: ignore[misc]
    adaptive = ScriptedCase("adaptive", lambda turn: 100.0)
    policy_rows.measure([*cases, adaptive], 0.0, 4, Namespace(turns=8, max_tokens=1))
    assert policy_rows.of_best(cases, adaptive)[1] == [1.0] * 8


def test_a_single_turn_is_compared_but_sure_of_nothing() -> None:
    cases = [ScriptedCase(name, lambda turn: 1.0, [rate]) for name, rate in (("slow", 90.0), ("best", 100.0))]
    found = policy_rows.against_best(cases, ScriptedCase("adaptive", lambda turn: 1.0, [96.0]))
    assert (found["best"], found["to_best"], found["meets_bar"]) == (["best"], [0.96] * 3, False)
    assert not found["misses_bar_for_sure"]


def test_each_turn_has_requests_of_its_own_and_who_is_far_behind_has_few() -> None:
    found, (slow, near, best, adaptive) = measured(
        *(lambda turn, rate=rate: rate for rate in (91.0, 93.0, 100.0, 90.0))
    )
    assert len(slow.rates) == 3 and len(near.rates) == len(best.rates) == len(adaptive.rates) == 8
    assert near.requests == adaptive.requests == [range(8 * turn, 8 * turn + 8) for turn in range(8)]
    assert found["texts_equal"]


def test_no_case_begins_while_the_threads_of_another_server_still_spin(rests: list[float]) -> None:
    _, cases = measured(lambda turn: 99.0, lambda turn: 100.0)
    assert rests == [0.5] * sum(len(case.rates) for case in cases)


def test_a_load_whose_time_is_over_has_a_turn_more_than_all_take_part_in() -> None:
    cases = [ScriptedCase("other", lambda turn: 1.0), ScriptedCase("adaptive", lambda turn: 1.0)]
    policy_rows.measure(cases, 0.0, 4, Namespace(turns=8, max_tokens=1), lambda: True)
    assert [len(case.rates) for case in cases] == [4, 4]


def test_a_median_is_known_as_well_as_its_turns_agree() -> None:
    assert policy_rows.interval([0.9, 1.0, 1.1] * 3)[0] < 1 < policy_rows.interval([0.9, 1.0, 1.1] * 3)[1]
    low, high = policy_rows.interval([0.9, 1.0, 1.1] * 100)
    assert 0.9 < low <= 1.0 <= high < 1.1
    assert policy_rows.interval(range(101)) == pytest.approx((40, 60), abs=1)  # five to either side is one deviation


def run(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "temperature": 1.0,
        "streams": 4,
        "tokens_per_second": {"no draft": 100.0, "k = 1": 90.0, "adaptive": 99.0},
        "turns": {"adaptive": [99.0, 98.0]},
        "best": ["k = 1", "no draft"],
        "to_no_draft": 0.99,
        "to_best": [0.985, 0.95, 1.01],
        "shares": [0.98, 0.02, 0.0, 0.0],
        "texts_equal": True,
        "meets_bar": True,
        "misses_bar_for_sure": False,
    }
    return values | changes


def test_the_table_has_every_run_and_its_error() -> None:
    text = policy_rows.table([run(), run(temperature=0.0)])
    assert len(text.splitlines()) == 4
    to_best = "0.985 (0.950 to 1.010) of k = 1 / no draft"
    assert f"| 1 | 4 | 100 | 90 | 99 | 2 | 0.99 | {to_best} | 98 %, 2 %, 0 %, 0 % |" in text


def test_what_is_missed_is_named() -> None:
    assert "MISSES" not in policy_rows.verdict([run()])
    said = policy_rows.verdict([run(), run(meets_bar=False, streams=8, texts_equal=False)])
    assert "MISSES the bar of 0.97 at temperature 1 x 8; nowhere beyond chance." in said
    sure = run(meets_bar=False, misses_bar_for_sure=True)
    assert "beyond chance at temperature 1 x 4." in policy_rows.verdict([sure, run()])
    assert "TEXTS DIFFER at temperature 1 x 8" in said


def test_reports_of_one_load_each_become_one_by_load(tmp_path: Path) -> None:
    paths = []
    for temperature, streams in ((1.0, 1), (0.0, 8), (0.0, 4)):
        paths.append(tmp_path / f"{temperature}_{streams}.json")
        report = {"machine": "m", "command": [str(streams)], "runs": [run(temperature=temperature, streams=streams)]}
        paths[-1].write_text(json.dumps(report))
    found = joined(paths)
    assert [(each["temperature"], each["streams"]) for each in found["runs"]] == [(0.0, 4), (0.0, 8), (1.0, 1)]
    assert found["machine"] == "m" and found["command"] == [["1"], ["8"], ["4"]]
