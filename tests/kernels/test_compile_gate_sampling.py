"""The sampling kernels are compiled for an H100 and judged by their machine code: no GPU needed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REGISTERS = 65_536
"""The registers of a multiprocessor."""


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    tests = Path(__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), *sys.path])
    run = subprocess.run(
        [sys.executable, "-m", "support.sampling_compile_gate"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result: dict[str, dict[str, Any]] = json.loads(run.stdout)
    return result


def test_nothing_spills(compiled: dict[str, dict[str, Any]]) -> None:
    assert {name: kernel["stack_bytes"] for name, kernel in compiled.items()} == dict.fromkeys(compiled, 0)


def test_all_programs_of_256_rows_run_at_once(compiled: dict[str, dict[str, Any]]) -> None:
    """A second wave of a few programs would cost as much as the first."""
    draw = compiled["draw"]
    assert draw["registers"] * 32 * draw["num_warps"] * draw["programs_a_multiprocessor"] <= REGISTERS


def test_maxima_are_one_instruction_a_warp_and_the_check_reads_ahead(compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled["draw"]["instructions"]["REDUX"] >= 4
    assert compiled["check"]["instructions"]["LDGSTS"] >= 10
