"""Every process of a served model is killed, ended and paused under 16 streams (scripts/kill_matrix.py)."""

from pathlib import Path

import pytest

from kill_matrix import PROCESSES, SIGNALS, run_case

NANO = Path(__file__).resolve().parents[2] / "demo/kimi-nano"
CUT_OFF_WITHIN_S = 15.0
"""A server that was told to end takes 10 s at most; docs/operations.md has the table."""
GOES_ON_S = 30.0
"""An endpoint that was told to end cuts off no stream sooner; on a busy machine they take longer."""
KILL, END, PAUSE = SIGNALS
CUTS_OFF = {
    ("spec_ensemble", KILL): {"gRPC", "HTTP", "endpoint"},
    ("kimi_target", KILL): {"gRPC", "HTTP", "endpoint"},
    ("kimi_target", PAUSE): {"gRPC", "HTTP", "endpoint"},
    ("tritonserver", KILL): {"gRPC", "HTTP", "endpoint"},
    ("tritonserver", END): {"gRPC", "HTTP", "endpoint"},
    ("kimi serve", KILL): {"gRPC", "HTTP", "endpoint"},
    ("kimi serve", END): {"gRPC", "HTTP", "endpoint"},
    ("endpoint", KILL): {"endpoint"},
}
"""The clients whose streams end early; those of any other case go on to their end."""


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("signal_name", SIGNALS)
@pytest.mark.parametrize("name", PROCESSES)
def test_every_stream_ends_and_nothing_is_left(name, signal_name, turn):
    row = run_case(NANO, name, signal_name)
    assert row["streams left"] == 0, row
    for how, last_s in row["last of each s"].items():
        client, end = how.split(": ")
        is_cut_early = client in CUTS_OFF.get((name, signal_name), ()) and last_s < CUT_OFF_WITHIN_S
        is_cut_late = (name, signal_name, client) == ("endpoint", END, "endpoint") and last_s > GOES_ON_S
        assert end == "whole" or is_cut_early or is_cut_late, row
    assert row["service"] == "back" or row["service"].startswith("ended"), row
    assert not any(row["left"].values()), row
