"""Documented commands that take minutes: `make soak` runs them as the pages say, once each."""

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.documented_commands import all_commands

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1_200
pytestmark = pytest.mark.soak


def run(words):
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_speed_on_a_cpu(tmp_path):
    """Measured once instead of five times, into a file of the test's own and a copy of the card."""
    (command,) = {c.text for c in all_commands() if "benchmarks/cpu_speed.py" in c.text}
    card, report = tmp_path / "card.md", tmp_path / "speed.json"
    card.write_text((ROOT / "demo/README.md").read_text())
    # The short prompts instead of held-out ones, whose corpus would have to be prepared first.
    words = shlex.split(command.replace("demo/README.md", str(card)).replace("--held-out out/nano-data", ""))
    run([sys.executable, *words[1:], "--repeats", "1", "--json", str(report)])
    assert json.loads(report.read_text())
    assert "no draft" in card.read_text()


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="make docs installs what it needs: pip")
def test_the_site_is_built_with_every_link_checked():
    assert "out/site/index.html" in run([sys.executable, "scripts/build_site.py"])
