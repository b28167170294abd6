"""The made-up trace is one that `kimi bench --trace` reads, of the size that was asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

from kimi_backend.cli.trace_file import Session, read_trace

ROOT = Path(__file__).resolve().parents[2]


def made(path: Path, *options: str) -> list[Session]:
    command = [sys.executable, str(ROOT / "benchmarks/make_trace.py"), str(path), "--requests", "200", *options]
    subprocess.run(command, check=True, capture_output=True)
    return read_trace(path)


def test_lengths_ids_and_sessions(tmp_path: Path) -> None:
    sessions = made(tmp_path / "trace.jsonl", "--input", "100", "--block", "16")
    turns = [turn for session in sessions for turn in session.turns]
    assert len(turns) == 200
    assert sum(turn.input_length for turn in turns if turn.hash_ids) / len(turns) == pytest.approx(85, rel=0.3)
    assert all(len(turn.hash_ids) == -(-turn.input_length // 16) for turn in turns if turn.hash_ids)
    assert {len(session.turns) for session in sessions} >= {1, 3}
    first = [session.turns[0].hash_ids[0] for session in sessions]
    assert len(set(first)) < len(first)


def test_text(tmp_path: Path) -> None:
    sessions = made(tmp_path / "trace.jsonl", "--text")
    assert len(sessions) == 200
    assert all(session.turns[0].text for session in sessions)
