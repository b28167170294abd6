"""The progress of a long transfer is shown; a short one is silent."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kimi_backend.checkpoint import progress, random_checkpoint
from kimi_backend.checkpoint.progress import Advance, WatchedTensors, byte_progress, count_progress
from kimi_backend.checkpoint.tensor_source import InMemoryTensors
from support.checkpoint_folders import make_tiny


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_a_log_gets_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with (
        caplog.at_level(logging.INFO, "kimi_backend.checkpoint"),
        byte_progress("loading target", 4 * 10**9) as advance,
    ):
        for _ in range(4):
            clock.now += 4
            advance(10**9)
    assert [record.getMessage() for record in caplog.records] == [
        "loading target done_gb=3.0 total_gb=4.0 gb_per_s=0.25"
    ]


@pytest.mark.parametrize(("seconds", "is_shown"), [(1.0, False), (3.0, True)])
def test_a_terminal_gets_a_bar_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float, is_shown: bool
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with byte_progress("loading target", 2 * 10**9) as advance:
        clock.now += seconds
        advance(10**9)
    output = capsys.readouterr()
    assert ("loading target" in output.err) == is_shown
    assert output.out == ""


def test_reads_are_counted_in_bytes() -> None:
    seen: list[int] = []
    source = WatchedTensors(InMemoryTensors({"a": torch.zeros(4, 8, dtype=torch.bfloat16)}), seen.append)
    assert source.read("a", 1, 2, 5).shape == (4, 3)
    assert (source.names(), source.shape("a"), source.dtype("a")) == ({"a"}, (4, 8), torch.bfloat16)
    source.read("a")
    assert seen == [24, 64]


def test_what_is_written_adds_up_to_what_was_announced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    announced: dict[str, int] = {}
    done: dict[str, int] = {}

    @contextmanager
    def kept(description: str, total_bytes: int) -> Iterator[Advance]:
        announced[description], done[description] = total_bytes, 0

        def advance(num_bytes: int) -> None:
            done[description] += num_bytes

        yield advance

    monkeypatch.setattr(random_checkpoint, "byte_progress", kept)
    make_tiny(tmp_path / "tiny")
    assert list(announced) == ["writing target", "writing draft"]
    assert announced == done


def test_pieces_are_counted_in_a_log_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with caplog.at_level(logging.INFO, "kimi_backend.checkpoint"):
        with count_progress("warming up", 5) as advance:
            for _ in range(5):
                clock.now += 6
                advance(1)
        with count_progress("nothing", 0):
            pass
    assert [record.getMessage() for record in caplog.records] == [
        "warming up done=2 total=5",
        "warming up done=4 total=5",
        "warming up done=5 total=5 seconds=30.0",
    ]


def test_a_terminal_gets_a_bar_of_pieces(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with count_progress("warming up", 5) as advance:
        clock.now += 3.0
        advance(2)
    assert "2/5" in capsys.readouterr().err
