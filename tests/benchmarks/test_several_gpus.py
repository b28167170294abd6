"""`benchmarks/several_gpus.py`: what its verdicts say of figures that are right and of figures that are wrong."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kimi_backend.checkpoint.presets import Preset
from several_gpus_suite import collectives, depth
from several_gpus_suite.verdict import Verdict, run_command


def test_a_verdict_holds_only_where_something_was_asked() -> None:
    verdict = Verdict()
    verdict.tell("a figure")
    assert not verdict.holds
    verdict.ask(True, "one")
    assert verdict.holds
    verdict.ask(False, "another")
    assert not verdict.holds
    assert verdict.text("title").splitlines()[-2:] == ["  FAILS  another", "VERDICT: FAILED"]


def test_a_jobs_command_imports_the_repository_and_what_its_caller_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_caller.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_command(["-c", "import of_the_caller, kimi_kernels, slice_suite"]) == 0
    monkeypatch.delenv("PYTHONPATH")
    assert run_command(["-c", "import kimi_kernels, slice_suite"]) == 0
    assert run_command(["-c", "import of_the_caller"]) == 1


@pytest.mark.parametrize(("in_parts_us", "holds"), [(9.0, True), (13.0, False)])
def test_the_better_of_our_sums_is_compared_with_the_librarys(in_parts_us: float, holds: bool) -> None:
    times = {"sum, whole": 20.0, "sum, in parts": in_parts_us, "sum, NCCL": 12.0, "argmax, NCCL": 5.0}
    verdict = Verdict()
    collectives.judge({"results": [{"op": op, "rows": 4, "time_us": us} for op, us in times.items()]}, verdict)
    assert [line[0] for line in verdict.lines] == [holds, None]
    assert verdict.holds == holds


@pytest.mark.parametrize(("deepest_ms", "holds"), [(10.0, True), (11.0, False), (None, False)])
def test_two_depths_foretell_the_third(deepest_ms: float | None, holds: bool) -> None:
    def case(num_layers: int, round_ms: float | None) -> dict[str, Any]:
        about: dict[str, Any] = {"num_layers": num_layers, "batch_size": 1, "num_speculative_tokens": 0}
        return about if round_ms is None else {**about, "round_ms": round_ms}

    verdict = Verdict()
    depth.judge([case(4, 2.5), case(9, 5.0), case(19, deepest_ms)], [4, 9, 19], verdict, asks=True)
    assert verdict.holds == holds


def test_the_deepest_slice_grows_with_the_ranks(tmp_path: Path) -> None:
    found = [depth.deepest_that_fits(Preset.KIMI_K25, ranks, tmp_path, gpu_memory_gib=400) for ranks in (1, 8)]
    assert 3 <= found[0] < found[1] < 61  # a CPU keeps experts unquantised


def test_a_preset_with_fewer_heads_than_ranks_is_given_as_many(tmp_path: Path) -> None:
    assert depth.deepest_that_fits(Preset.TINY, 8, tmp_path, gpu_memory_gib=40) == depth.MOST_LAYERS
