"""Every benchmark finds what it imports: most run on a GPU or for minutes, so that nobody would notice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUNS_WITHOUT_CLIENT = "import lookup, sys; assert 'tritonclient' not in sys.modules, 'lookup --in-process runs without'"


def test_what_benchmarks_import_is_there() -> None:
    """They are imported in a process of their own: their names are as plain as `slice`."""
    pytest.importorskip("triton")
    files = [file.relative_to(BENCHMARKS) for file in BENCHMARKS.rglob("*.py") if "models" not in file.parts]
    modules = sorted(".".join(file.with_suffix("").parts) for file in files if file.stem != "__init__")
    assert len(modules) > 50
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([RUNS_WITHOUT_CLIENT, *(f"import {module}" for module in modules)])],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
