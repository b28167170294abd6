"""The benchmark's arithmetic and table, without a GPU: floors, promises, discarding, comparing with an earlier run."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """benchmarks/kernels.py, under a name that the folder kernels/ does not have too."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmark_harness", BENCHMARKS / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_harness", module)
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.startswith("kernel_cases")]:
        del sys.modules[name]


def test_the_floor_is_the_larger_of_two_times(harness: ModuleType) -> None:
    from kernel_cases import Case, Ceilings

    ceilings = Ceilings(read_bytes_per_us=3e6, matmul_flops_per_us=8e8)

    def case(num_bytes: float, num_flops: float, rate: float = 1.0) -> Case:
        return Case(op="x", name="y", num_bytes=num_bytes, num_flops=num_flops, prepare=lambda: None, flop_rate=rate)

    assert case(6e6, 8e8).floor_us(ceilings) == 2.0
    assert case(6e6, 8e8).limited_by(ceilings) == "memory"
    assert case(6e6, 32e8).floor_us(ceilings) == 4.0
    assert case(6e6, 32e8).limited_by(ceilings) == "compute"
    assert case(6e6, 32e8, 2.0).floor_us(ceilings) == 2.0


def test_promises_are_judged_by_the_tighter_limit(harness: ModuleType) -> None:
    from kernel_cases import Case

    case = Case(op="x", name="y", num_bytes=0, num_flops=0, prepare=lambda: None, limit_us=50.0, limit_of_floor=1.2)
    assert harness.verdict(case, 47.0, 40.0) == "kept (<= 48.0)"
    assert harness.verdict(case, 49.0, 40.0) == "BROKEN (<= 48.0)"
    assert harness.verdict(case, 0.0, 40.0) == ""


def test_a_slow_card_is_discarded(harness: ModuleType) -> None:
    from kernel_cases import Ceilings
    from kernel_cases.ceilings import discard_reason

    assert discard_reason("NVIDIA H100", Ceilings(read_bytes_per_us=3.1e6, matmul_flops_per_us=7.4e8)) == ""
    assert "2.90 TB/s" in discard_reason("NVIDIA H100", Ceilings(read_bytes_per_us=2.9e6, matmul_flops_per_us=7.4e8))
    assert "690" in discard_reason("NVIDIA H100", Ceilings(read_bytes_per_us=3.1e6, matmul_flops_per_us=6.9e8))


def test_errors_above_the_limit_and_nan_fail(harness: ModuleType) -> None:
    from kernel_cases import relative_error

    assert relative_error(torch.tensor([1.01, 0.0]), torch.tensor([1.0, 0.0]), 0.02) == pytest.approx(0.01, rel=1e-4)
    for wrong in (torch.tensor([1.1, 0.0]), torch.tensor([torch.nan, 0.0])):
        with pytest.raises(AssertionError, match="relative error"):
            relative_error(wrong, torch.tensor([1.0, 0.0]), 0.02)


def test_inputs_rotate_until_the_cache_is_full_of_others(harness: ModuleType) -> None:
    from kernel_cases import ROTATED_BYTES, num_input_sets

    assert num_input_sets(ROTATED_BYTES / 10) == 10
    assert num_input_sets(ROTATED_BYTES * 3) == 2
    assert num_input_sets(1, at_most=64) == 64


def test_comparing_with_an_earlier_run(harness: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"op": "x", "name": "y", "time_us": 110.0}
    earlier = {"card": "H100", "date": "2026-11-27", "command": "c", "results": [{**row, "time_us": 100.0}]}
    harness.print_comparison({"results": [row, {**row, "name": "new"}]}, earlier)
    printed = capsys.readouterr().out
    assert "+10.0%" in printed
    assert "new" not in printed


def test_a_run_that_is_cut_off_keeps_its_rows_and_says_so(harness: ModuleType, tmp_path: Path) -> None:
    from kernel_cases import Ceilings

    ceilings = Ceilings(read_bytes_per_us=3.1e6, matmul_flops_per_us=7.7e8)
    result = harness.Result(
        op="x", name="y", floor_us=1.0, time_us=2.0, spread_us=0.1, limited_by="memory", error=0.0, promise="", peer=""
    )
    harness.save(harness.make_report("NVIDIA H100", ceilings, None, [result]), tmp_path)
    kept = json.loads((tmp_path / "kernels.json").read_text())
    assert kept["discarded"] == "the run did not end"
    assert [row["time_us"] for row in kept["results"]] == [2.0]
    assert not harness.make_report("NVIDIA H100", ceilings, ceilings, [result])["discarded"]
