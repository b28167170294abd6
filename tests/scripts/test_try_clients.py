"""The table of other people's clients: what it makes of their reports and of those that fail."""

import json
import os
from pathlib import Path

import pytest

import try_clients
from try_clients import Addresses

TABLE = """
|Tasks|Version|Filter|n-shot|Metric|   |Value|   |Stderr|
|---|---:|---|---:|---|---|---:|---|---:|
|arithmetic|1|none|0|exact_match|↑|0.25|±|0.1|
||||0|perplexity|↓|3.5|±|N/A|
"""


def addresses(work: Path) -> Addresses:
    return Addresses(grpc="localhost:1", openai="http://localhost:2", work=work)


def test_values_stand_behind_the_arrow_of_their_metric() -> None:
    assert try_clients.measured(TABLE) == "exact_match 0.25, perplexity 3.5"
    with pytest.raises(RuntimeError, match="no result: nothing"):
        try_clients.measured("nothing")


def test_the_newest_report_must_have_answered_every_request(tmp_path: Path) -> None:
    for age, (name, count, errors) in enumerate((("b_genai_perf", 7, []), ("profile_export_aiperf", 8, []))):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"request_count": {"avg": count}, "error_summary": errors}))
        os.utime(path, (age, age))
    assert try_clients.checked_report(tmp_path) == "8 requests, no error"
    os.utime(tmp_path / "b_genai_perf.json", (9, 9))
    with pytest.raises(RuntimeError, match="7 of 8 requests were answered"):
        try_clients.checked_report(tmp_path)
    path.write_text(json.dumps({"request_count": {"avg": 8}, "error_summary": ["refused"]}))
    with pytest.raises(RuntimeError, match="refused"):
        try_clients.checked_report(tmp_path)


def test_a_program_gets_the_addresses_and_its_exit_code_counts(tmp_path: Path) -> None:
    at = addresses(tmp_path)
    assert try_clients.run_program("echo GRPC OPENAI/v1 TOKENIZER", at) == "8 requests, no error"
    assert (tmp_path / "echo.log").read_text() == f"localhost:1 http://localhost:2/v1 {tmp_path}/tokenizer\n"
    with pytest.raises(RuntimeError, match="exit code 1"):
        try_clients.run_program("false", at)


def test_a_client_that_fails_is_a_row_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(at: Addresses) -> str:
        raise ValueError(at.grpc)

    libraries = {"works": ("pytest", "`f`", lambda at: f"at {at.openai}"), "breaks": ("pytest", "`g`", breaks)}
    monkeypatch.setattr(try_clients, "LIBRARIES", libraries)
    monkeypatch.setattr(try_clients, "PROGRAMS", {"echoes": ("echo 1", "echo")})
    monkeypatch.setattr(try_clients, "write_tokenizer", lambda folder: None)
    argv = ["try_clients.py", "--grpc", "localhost:1", "--openai", "http://localhost:2", "--work", str(tmp_path)]
    monkeypatch.setattr("sys.argv", argv)
    assert try_clients.main() == 1
    _, _, *rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[3]) for row in rows] == [
        ("| works", "at http://localhost:2 |"),
        ("| breaks", "failed |"),
        ("| echoes", "8 requests, no error |"),
    ]
    monkeypatch.setattr("sys.argv", [*argv, "--only", "works"])
    assert try_clients.main() == 0
