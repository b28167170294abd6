"""`kimi eval` against the real server, broken off and gone on with."""

import json
from pathlib import Path

from typer.testing import CliRunner

from kimi_backend.cli.main import app

FILE = Path(__file__).resolve().parents[2] / "benchmarks/arithmetic.jsonl"


def test_an_evaluation_goes_on_where_it_was_broken_off(url, tmp_path):
    out = tmp_path / "result.json"
    command = ["eval", str(FILE), f"--url={url}", "--shots=1", "--limit=3", "--max-tokens=12", f"--json={out}"]
    assert CliRunner().invoke(app, command).exit_code == 0
    whole = json.loads(out.read_text())
    assert set(whole["runs"]) == {"k=3", "k=0"}
    assert whole["runs"]["k=3"]["speculation"]["rounds"] > 0
    assert whole["runs"]["k=0"]["speculation"] is None
    rows = [json.loads(line) for line in Path(f"{out}.rows").read_text().splitlines()[1:]]
    replies = {(row["num_speculative_tokens"], row["index"]): row["reply"] for row in rows}
    assert all(replies[3, i] == replies[0, i] for i in range(3)), "the same text with and without speculation"
    Path(f"{out}.rows").write_text("".join(Path(f"{out}.rows").read_text().splitlines(keepends=True)[:3]))
    assert CliRunner().invoke(app, command).exit_code == 0
    again = json.loads(out.read_text())
    assert [run["num_resumed"] for run in again["runs"].values()] == [2, 0]
    for run in (*whole["runs"].values(), *again["runs"].values()):
        for name in ("seconds", "num_resumed"):
            del run[name]
    assert again == whole
