"""The model card says what the reports say, a missed bar and a wrong verdict of the probe too."""

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_nano.card import BEGIN, END, write_card


def numbers(length: float) -> dict[str, Any]:
    return {"acceptance_length": length, "standard_error": 0.01, "per_position": [0.5, 0.25, 0.125]}


def report(coupled: float) -> dict[str, Any]:
    lookup = {"prompt_lookup": numbers(1.5), "distinct_4gram_share": 0.5, "distinct_4gram_share_not_looping": None}
    held_out = dict.fromkeys(
        ("nats_per_token", "nats_per_byte", "gzip_nats_per_byte_each_file", "gzip_nats_per_byte_one_stream"), 1.0
    )
    wrong = {"fc chunks swapped": numbers(1.1) | {"standard_errors_below": 2.0}}
    return {
        "num_prompts": 7,
        "text": {"0.0": lookup | {"looping_prompts": 3}},
        "held_out": held_out | {"files": 2, "tokens": 300},
        "samples": [{"file": "a/b.py", "temperature": "0.6", "prompt_end": "x\n    y =", "continuation": " 1\n"}],
        "drafts": {
            "mla": {"temperature 0": {"greedy": numbers(2.5)}, "wrong settings": wrong},
            "mla31": {"temperature 1": {"coupled": numbers(coupled)}},
        },
    }


def probe_row(is_the_truth: bool) -> dict[str, Any]:
    chosen = "aux R(2),R(4),R(5); rope as the file; fc_norm off, norm_output off"
    rivals = [chosen.replace("as the file", "theta 10000"), chosen.replace("norm_output off", "norm_output on")]
    return {
        "false statement": "nothing",
        "prompts": 7,
        "file's acceptance length": 2.5,
        "chosen acceptance length": 2.75,
        "standard errors": 3.25,
        "chosen": chosen,
        "is the truth": is_the_truth,
        "not told apart": rivals,
    }


def card_of(tmp_path: Path, coupled: float, is_the_truth: bool) -> list[str]:
    card, figures, probes = tmp_path / "card.md", tmp_path / "report.json", tmp_path / "probes.json"
    card.write_text(f"before\n{BEGIN}\nold figures\n{END}\nafter\n")
    figures.write_text(json.dumps(report(coupled)))
    probes.write_text(json.dumps({"mla": [probe_row(is_the_truth)]}))
    write_card([figures], card, [probes])
    return card.read_text().splitlines()


@pytest.mark.parametrize(("coupled", "verdict"), [(1.899, "1.9: NOT met"), (1.9, "1.9: met")])
def test_a_bar_is_met_or_not_by_the_unrounded_number(tmp_path: Path, coupled: float, verdict: str) -> None:
    lines = card_of(tmp_path, coupled, is_the_truth=True)
    assert f"| mla31 | temperature 1 | coupled | 1.90 ± 0.01 | 50% | 25% | 12% |  |  | {verdict} |" in lines
    assert "| mla | temperature 0 | greedy | 2.50 ± 0.01 | 50% | 25% | 12% |  |  | 2.2: met |" in lines
    assert "| mla | fc chunks swapped | 1.10 | 2.0 | less than 3 |" in lines


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    lines = card_of(tmp_path, 2.0, is_the_truth=True)
    assert (lines[0], lines[1], lines[-2], lines[-1]) == ("before", BEGIN, END, "after")
    assert "old figures" not in lines


@pytest.mark.parametrize("is_the_truth", [True, False])
def test_a_wrong_verdict_of_the_probe_is_told(tmp_path: Path, is_the_truth: bool) -> None:
    (line,) = (line for line in card_of(tmp_path, 2.0, is_the_truth) if line.startswith("| mla | 7 |"))
    chosen = "the true setting" if is_the_truth else probe_row(False)["chosen"]
    assert line == f"| mla | 7 | nothing | 2.50 | 2.75 | 3.2 | {chosen} | rope theta 10000, norm_output on |"
