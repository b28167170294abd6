"""`scripts/setup.sh` in an environment that is there already, whose interpreter only writes down what it is asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "scripts" / "setup.sh"
COMMANDS = ("pytest", "ruff", "mypy", "lint-imports")


def installed_again(venv: Path) -> list[str]:
    """Run it and return what it has pip install although a package is there."""
    asked = venv / "asked"
    write_command(venv / "bin/python", f'#!/bin/sh\necho "$*" >> {asked}\n')
    environment = {**os.environ, "PYTHON": sys.executable, "VENV": str(venv)}
    subprocess.run([SETUP], env=environment, check=True, capture_output=True)
    before, option, names = asked.read_text().partition("--ignore-installed ")
    assert "install --no-compile --progress-bar off" in before
    return names.splitlines()[0].split() if option else []


def write_command(path: Path, text: str = "") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(("absent", "tools"), [("pytest", "pytest"), ("lint-imports", "import-linter"), ("", "")])
def test_tools_whose_commands_the_system_has_get_them_here(tmp_path: Path, absent: str, tools: str) -> None:
    for name in set(COMMANDS) - {absent}:
        write_command(tmp_path / "bin" / name)
    assert installed_again(tmp_path) == tools.split()
