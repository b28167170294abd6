"""Costs of steps as tables: times by shape, and how many tokens are drafted for them."""

from dataclasses import replace
from io import StringIO
from typing import Any

from rich.console import Console

from kimi_backend.cli.cost_report import BATCH_SIZES, choices, costs_report, print_costs
from support.made_up_costs import linear_costs

TARGET, DRAFT = linear_costs(3000, 40), linear_costs(100, 5, 10)


def shown(report: dict[str, Any] | None) -> list[list[str]]:
    """The words of each line."""
    text = StringIO()
    print_costs(Console(file=text, width=150), report)
    return [line.split() for line in text.getvalue().splitlines()]


def test_both_models_steps_and_the_choices_are_tables() -> None:
    report = costs_report({"target": TARGET, "draft": DRAFT}, "here")
    assert report is not None
    assert report["draft"]["proposals_ms"]["4"] == [0.04, 0.18, 0.32, 0.46, 0.6, 0.74, 0.88]
    lines = shown(report)
    assert lines[0] == ["target's", "steps,", "ms", "by", "rows", "of", "each", "sequence", "(here)"]
    assert lines[1:3] == [["sequences", "1", "2", "4", "8"], ["1", "3.040", "3.080", "3.160", "3.320"]]
    assert lines[6][:2] == ["draft's", "steps,"]
    assert lines[7] == ["sequences", "1", "2", "4", "8", "7", "proposals"]
    assert lines[8] == ["1", "0.105", "0.110", "0.120", "0.140", "+", "0.670"]
    assert lines[12][:5] == ["draft", "tokens", "that", "are", "chosen"]
    assert lines[13] == ["sequences", "high", "middling", "low"]
    assert [line[0] for line in lines[14:]] == [str(size) for size in BATCH_SIZES]
    (first, *_), found = (lines[14][1:3], report["choices"])
    high = found[0]
    gain = high["tokens_per_second"] / high["without_a_draft"] - 1
    assert (first, lines[14][2]) == (f"{high['num_draft_tokens']:g}", f"({gain:+.0%})")


def test_a_target_alone_has_no_choices_and_nothing_kept_says_so() -> None:
    report = costs_report({"target": TARGET}, "here")
    assert report is not None
    assert len(shown(report)) == 6
    assert costs_report({"draft": DRAFT}, "here") is None
    assert shown(None)[0][:4] == ["step", "costs:", "none", "are"]


def test_a_draft_of_one_proposal_is_worded_so() -> None:
    draft = replace(DRAFT, proposals_us=tuple(row[:1] for row in DRAFT.proposals_us))
    report = costs_report({"target": TARGET, "draft": draft}, "here")
    assert shown(report)[7] == ["sequences", "1", "2", "4", "8", "proposal"]


def test_choices_are_for_batches_that_were_timed_and_for_what_was_captured() -> None:
    few = replace(
        TARGET, num_seqs=(1, 4), step_us=TARGET.step_us[:2], padded_us=TARGET.padded_us[:2],
        context_us=(0.0, 0.0), row_context_us=(0.0, 0.0),
    )  # fmt: skip
    assert {item["num_seqs"] for item in choices(few, DRAFT)} == {1, 4}
    eager = choices(TARGET, DRAFT)
    captured = choices(replace(TARGET, is_captured=True), replace(DRAFT, is_captured=True))
    assert [item["acceptance"] for item in eager[:3]] == ["high", "middling", "low"]
    assert eager != captured
    assert all(0 <= item["num_draft_tokens"] <= 7 for item in eager + captured)
