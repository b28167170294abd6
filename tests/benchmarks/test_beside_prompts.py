"""`benchmarks/beside_prompts.py`: its percentiles, and streams beside prompts on a CPU."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import beside_prompts


def test_gaps_are_those_between_responses_of_the_time() -> None:
    heard = beside_prompts.Heard(times=[0.0, 1.0, 1.5, 3.0, 7.0])
    assert heard.gaps(1.2, 3.0) == [500.0, 1500.0]
    found = beside_prompts.percentiles([float(number) for number in range(101)])
    assert found == {"p50_ms": 50.0, "p99_ms": 99.0, "max_ms": 100.0, "count": 101}


def test_streams_go_on_beside_prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = "--preset tiny --layers 2 --device cpu --streams 2 --stream-prompt 20 --rounds-alone 4 --prompts 1"
    options += f" --prompt-tokens 150 --rows 32 0 --max-num-batched-tokens 64 --out {tmp_path / 'out.json'}"
    monkeypatch.setattr(sys, "argv", ["beside_prompts.py", *options.split()])
    beside_prompts.main()
    few, all_rows = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert (few["rows"], all_rows["rows"]) == (32, 0)
    for case in (few, all_rows):
        assert case["alone"]["count"] >= 2 * 4
        assert case["factor"]["p50_ms"] > 0
    assert few["beside"]["count"] >= 2 * (150 // 32)
