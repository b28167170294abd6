"""Every process of a served model is killed, ended and paused under 16 streams (scripts/kill_matrix.py)."""

from pathlib import Path

import pytest

from kill_matrix import PROCESSES, SIGNALS, run_case

NANO = Path(__file__).resolve().parents[2] / "demo/kimi-nano"
CUT_OFF_WITHIN_S = 15.0
"""A server that was told to end takes 10 s at most; docs/operations.md has the table."""


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("signal_name", SIGNALS)
@pytest.mark.parametrize("name", PROCESSES)
def test_every_stream_ends_and_nothing_is_left(name, signal_name, turn):
    row = run_case(NANO, name, signal_name)
    assert row["streams left"] == 0, row
    assert all(how.endswith("whole") for how in row["streams"]) or row["last stream s"] < CUT_OFF_WITHIN_S, row
    assert row["service"] == "back" or row["service"].startswith("ended"), row
    assert not any(row["left"].values()), row
