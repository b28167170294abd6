"""The policy's measurement: neighbours in time are compared, and a bar that is missed is named."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from serving_suite import policy_rows
from speculation_policy import Case, joined


def case(*rates: float) -> Case:
    return Case("x", None, 0, rates=list(rates))  # type: ignore[arg-type]


def test_the_first_slice_does_not_count_and_load_moves_both() -> None:
    assert policy_rows.ratio(case(1, 100, 50, 200), case(100, 100, 50, 200)) == (1.0, 0.0)
    assert policy_rows.ratio(case(1, 110, 45), case(1, 100, 50)) == (1.0, pytest.approx(0.1))


def run(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "temperature": 1.0,
        "streams": 4,
        "tokens_per_second": {"no draft": 100.0, "k = 1": 90.0, "adaptive": 99.0},
        "best_fixed": "k = 1",
        "adaptive_to_plain": [0.99, 0.01],
        "adaptive_to_best_fixed": [1.1, 0.02],
        "shares": [0.98, 0.02, 0.0, 0.0],
        "texts_equal": True,
        "meets_bar": True,
    }
    return values | changes


def test_the_table_has_every_run_and_its_error() -> None:
    text = policy_rows.table([run(), run(temperature=0.0)])
    assert len(text.splitlines()) == 4
    assert "| 1 | 4 | 100 | 90 | 99 | 0.99 ± 0.01 | 1.10 ± 0.02 (k = 1) | 98 %, 2 %, 0 %, 0 % |" in text


def test_what_is_missed_is_named() -> None:
    assert "MISSES" not in policy_rows.verdict([run()])
    said = policy_rows.verdict([run(), run(meets_bar=False, streams=8, texts_equal=False)])
    assert "MISSES the bar of 0.97 at temperature 1 x 8" in said
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
