"""The measurement of the chosen k: chances that give the lengths asked for, and a verdict that names what is missed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from k_from_costs import LENGTHS
from slice_suite.k_turns import emitted, scaled_chances, tokens_per_s, verdict
from slice_suite.recording import Round


@pytest.mark.parametrize("length", LENGTHS)
def test_chances_are_scaled_to_the_length_of_three_draft_tokens(length: float) -> None:
    chances = scaled_chances(length)
    assert emitted(chances, 3) == pytest.approx(length, abs=1e-6)
    assert max(chances) <= 1
    lengths = [emitted(chances, k) for k in range(8)]
    assert lengths == sorted(lengths)


def test_the_verdict_names_what_is_missed() -> None:
    good = {"length": 3.0, "batch": 4, "of_best": 0.99, "of_plain": 1.2, "mean_k": 2.0}
    rounds = [{"batch": 1, "k": 0, "off": 0.01, "spread": 0.0}, {"batch": 4, "k": 3, "off": -0.04, "spread": 0.02}]
    rounds += [{"batch": 4, "k": 2, "off": 0.04, "spread": 0.035}]
    said = verdict(
        {"drafts": {"bf16": {"rounds": rounds, "adaptive": [good, good | {"of_best": 0.9, "of_plain": 0.95}]}}}
    )
    assert "1 of 3 predictions" in said and "off: B=4 k=3 -4.0%" in said
    assert "1 of 2 adaptive runs" in said and "slow: 3.0 B=4 0.9" in said
    assert "below k = 0: 3.0 B=4 0.95" in said


def a_round(end_s: float, num_accepted: int, *num_draft_tokens: int) -> Round:
    num_rows = len(num_draft_tokens) + sum(num_draft_tokens)
    return Round(
        target_start_s=end_s - 1,
        target_launched_s=end_s - 0.9,
        target_end_s=end_s,
        num_seqs=len(num_draft_tokens),
        num_rows=num_rows,
        is_decode=True,
        num_tokens=len(num_draft_tokens) + num_accepted,
        num_draft_tokens=num_draft_tokens,
    )


def test_luck_moves_no_rate() -> None:
    """Two rounds of 2 s behind the first: one sequence has two draft tokens, of which 0.8 + 0.4 are kept."""
    for num_accepted in (0, 2):
        rounds = [a_round(0.0, 2, 2, 2), a_round(2.0, num_accepted, 2, 0), a_round(4.0, 0, 0, 0)]
        assert tokens_per_s(rounds, (0.8, 0.5)) == pytest.approx((2 + 1.2 + 2) / 4)
