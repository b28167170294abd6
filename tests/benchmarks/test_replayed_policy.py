"""Recorded acceptance, replayed: what is known of each place, and rounds by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from replayed_policy import COSTS, COUNTED_TOKENS, Machine, Replay
from serving_suite.recorded_acceptance import kept_by_place


def test_a_place_is_known_from_who_was_there_or_before_it() -> None:
    """Two runs over one text kept 3 of 3, then 0 of 1; and 1 of 1, then 2 of 7."""
    assert kept_by_place([[(3, 3), (1, 0)], [(1, 1), (7, 2)]]) == [3, 2, 2, 1, 0]


def test_rounds_take_what_the_table_says() -> None:
    """Three tokens are kept at each place. The first round verifies nothing."""
    machine = Machine.read(COSTS)
    for k, kept, target_us, draft_us in ((0, 0, 4860, 0), (3, 3, 6503, 865 + 1796)):
        rate = Replay(machine, 1, k, 0.0).run([[3] * 200])
        num_rounds = -(-(COUNTED_TOKENS - 1) // (kept + 1))
        seconds = num_rounds * (1e-6 * (target_us + draft_us) + 0.00145 + 0.00245 * (k > 0))
        first_s = 1e-6 * (4860 + (779 + 1796) * (k > 0)) + 0.00145 + 0.00245 * (k > 0)
        assert rate == pytest.approx((num_rounds * (kept + 1) + 1) / (seconds + first_s), rel=1e-6)
