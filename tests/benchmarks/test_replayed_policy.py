"""Recorded acceptance, replayed: rounds by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from replayed_policy import COSTS, COUNTED_TOKENS, Machine, Replay


def test_rounds_take_what_the_table_says() -> None:
    """Three tokens are kept at each place. The first round verifies nothing."""
    machine = Machine.read(COSTS)
    (step_us, _, verify_us, _), (extension_us, _, longer_us, _) = machine.target.step_us[0], machine.draft.step_us[0]
    proposals_us = machine.draft.proposals_us[0][2]
    for k, kept, target_us, draft_us in ((0, 0, step_us, 0.0), (3, 3, verify_us, longer_us + proposals_us)):
        rate = Replay(machine, 1, k, 0.0).run([[3] * 200])
        num_rounds, host_s = -(-(COUNTED_TOKENS - 1) // (kept + 1)), machine.host_s + machine.way_s * (k > 0)
        seconds = num_rounds * (1e-6 * (target_us + draft_us) + host_s)
        first_s = 1e-6 * (step_us + (extension_us + proposals_us) * (k > 0)) + host_s
        assert rate == pytest.approx((num_rounds * (kept + 1) + 1) / (seconds + first_s), rel=1e-6)
