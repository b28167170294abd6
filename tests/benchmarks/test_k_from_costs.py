"""The measurement of the chosen k: chances that give the lengths asked for, and a verdict that names what is missed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from k_from_costs import LENGTHS, emitted, scaled_chances, verdict


@pytest.mark.parametrize("length", LENGTHS)
def test_chances_are_scaled_to_the_length_of_three_draft_tokens(length: float) -> None:
    chances = scaled_chances(length)
    assert emitted(chances, 3) == pytest.approx(length, abs=1e-6)
    assert max(chances) <= 1
    lengths = [emitted(chances, k) for k in range(8)]
    assert lengths == sorted(lengths)


def test_the_verdict_names_what_is_missed() -> None:
    good = {"length": 3.0, "batch": 4, "of_best": 0.99, "of_plain": 1.2, "mean_k": 2.0}
    rounds = [{"batch": 1, "k": 0, "off": 0.01}, {"batch": 4, "k": 3, "off": -0.06}]
    said = verdict(
        {"drafts": {"bf16": {"rounds": rounds, "adaptive": [good, good | {"of_best": 0.9, "of_plain": 0.95}]}}}
    )
    assert "1 of 2 predictions" in said and "off: B=4 k=3 -6.0%" in said
    assert "1 of 2 adaptive runs" in said and "slow: 3.0 B=4 0.9" in said
    assert "below k = 0: 3.0 B=4 0.95" in said
