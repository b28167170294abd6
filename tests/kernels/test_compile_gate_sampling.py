"""The sampling kernels are compiled for an H100 and judged by their machine code: no GPU needed."""

from typing import Any

import pytest

from support.compile_record import run_gate

REGISTERS = 65_536
"""The registers of a multiprocessor."""


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    return run_gate("support.sampling_compile_gate")


def test_nothing_spills(compiled: dict[str, dict[str, Any]]) -> None:
    assert {name: kernel["stack_bytes"] for name, kernel in compiled.items()} == dict.fromkeys(compiled, 0)


def test_all_programs_of_256_rows_run_at_once(compiled: dict[str, dict[str, Any]]) -> None:
    """A second wave of a few programs would cost as much as the first."""
    draw = compiled["draw"]
    assert draw["registers"] * 32 * draw["num_warps"] * draw["programs_a_multiprocessor"] <= REGISTERS


def test_maxima_are_one_instruction_a_warp_and_the_check_reads_ahead(compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled["draw"]["instructions"]["REDUX"] >= 4
    assert compiled["check"]["instructions"]["LDGSTS"] >= 10
