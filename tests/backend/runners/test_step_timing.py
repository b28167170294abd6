"""Steps are timed over sequences of their own, in every shape, and known at the next start."""

import itertools
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.config.settings import ServingSettings
from kimi_backend.runners.cost_file import CostFile, costs_folder, machine
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.step_timing import (
    CPU_PASSES,
    Sequences,
    run_burst,
    scheduled_seconds,
    shapes_of,
    step_seconds,
    time_steps,
)
from kimi_backend.spec_decode.protocols import Pending
from kimi_backend.spec_decode.step_times import StepTimes
from kimi_backend.types.plan import RowPlan
from kimi_backend.types.step_costs import StepCosts
from kimi_kernels.kernel_set import KernelSet
from support.captured_runners import Setting, runner_pair
from support.made_up_costs import linear_costs
from support.plain_recorder import PlainRecorder

LIMITS = RunnerLimits(max_num_batched_tokens=32, max_num_seqs=4, max_model_len=128)
SETTING = Setting(kernels=KernelSet.plain(), limits=LIMITS)
CUDA = torch.device("cuda")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step that is timed; it takes as many microseconds as steps were timed before it."""
    shapes: list[int] = []

    def seconds_of(launch, device: torch.device, burst_s: float) -> float:  # type: ignore[no-untyped-def]
        launch().wait()
        shapes.append(len(launch.args[0].token_ids))
        return 1e-6 * len(shapes)

    monkeypatch.setattr("kimi_backend.runners.step_timing.step_seconds", seconds_of)
    monkeypatch.setattr("kimi_backend.runners.step_timing.CPU_BUDGET_S", 0.0)
    return shapes


@pytest.fixture
def bursts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each step was given, none of which is run."""
    given: list[float] = []

    def seconds_of(launch, device: torch.device, burst_s: float) -> float:  # type: ignore[no-untyped-def]
        given.append(burst_s)
        return 1e-6

    monkeypatch.setattr("kimi_backend.runners.step_timing.step_seconds", seconds_of)
    return given


@pytest.mark.parametrize(("kind", "is_captured"), [("mla31", False), ("mha", False), ("mla31", True)])
def test_both_runners_time_every_shape_in_every_pass(kind: str, is_captured: bool, counted: list[int]) -> None:
    for runner in runner_pair(SETTING, kind, PlainRecorder() if is_captured else None):
        runner.warm_up()
        counted.clear()
        costs = runner.measure_costs()
        limits, is_draft = runner._limits, runner.describe().role == "draft"
        shapes = shapes_of(limits, is_captured=is_captured, is_draft=is_draft)
        assert len(set(shapes)) == len(shapes)
        assert len(counted) == CPU_PASSES * len(shapes)
        assert costs.is_captured == is_captured
        assert max(counted) == costs.num_seqs[-1] * costs.query_lens[-1]
        assert {len(row) for row in costs.proposals_us} == ({limits.max_speculative_tokens} if is_draft else set())
        assert (costs.padded_us == costs.step_us) == (not is_captured)
        assert runner.measure_costs() is costs


def timed(device: torch.device, advanced: list[int]) -> StepCosts:
    """Costs of captured steps of a target on a CPU, as if it were another device."""
    target, _ = runner_pair(SETTING, "mla", PlainRecorder())
    sequences = Sequences(pool=target._pool, limits=LIMITS, vocab_size=target._vocab_size, is_draft=False)
    return time_steps(sequences, target._launch_timed, device, advanced.append, is_captured=True)[0]


def test_a_gpu_is_timed_from_the_smallest_shape_to_the_largest_and_back(counted: list[int]) -> None:
    """Its clock falls under load and recovers: a shape's time is the mean of one from either side."""
    advanced: list[int] = []
    costs = timed(CUDA, advanced)
    num_shapes = len(shapes_of(LIMITS, is_captured=True, is_draft=False))
    assert counted == counted[::-1] and len(counted) == sum(advanced) == 2 * num_shapes
    timed_us = [us for grid in (costs.step_us, costs.padded_us[1:]) for row in grid for us in row]
    assert timed_us == pytest.approx([num_shapes + 0.5] * len(timed_us))


@pytest.mark.parametrize(("pass_s", "num_passes"), [(0.21, 4), (0.19, 5), (0.16, 6)])
def test_a_cpu_is_timed_as_often_as_a_second_allows(
    pass_s: float, num_passes: int, bursts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_shapes, advanced = len(shapes_of(LIMITS, is_captured=True, is_draft=False)), list[int]()
    clock = SimpleNamespace(perf_counter=lambda: pass_s * len(bursts) / num_shapes)
    monkeypatch.setattr("kimi_backend.runners.step_timing.time", clock)
    timed(torch.device("cpu"), advanced)
    assert (len(bursts), len(advanced)) == (num_passes * num_shapes, 4 * num_shapes)


def test_bursts_on_a_gpu_take_four_seconds_together(bursts: list[float]) -> None:
    timed(CUDA, [])
    assert sum(bursts) == pytest.approx(4)


@pytest.mark.parametrize("is_captured", [False, True])
def test_what_may_have_to_be_compiled_runs_before_it_is_timed(is_captured: bool, bursts: list[float]) -> None:
    target, _ = runner_pair(SETTING, "mla", None)
    sequences = Sequences(pool=target._pool, limits=LIMITS, vocab_size=target._vocab_size, is_draft=False)
    runs: list[int] = []

    def launch(rows: RowPlan, num_proposals: int) -> Pending[Any]:
        runs.append(len(bursts))
        return target._launch_timed(rows, num_proposals)

    time_steps(sequences, launch, CUDA, lambda _: None, is_captured=is_captured)
    num_shapes = len(shapes_of(LIMITS, is_captured=is_captured, is_draft=False))
    assert runs == ([] if is_captured else [0] * num_shapes)


@dataclass
class VirtualGpu:
    """A GPU and its host in virtual time. A step's parts each follow an upload, and a launch queues them all when the
    last step's uploads are done; a first run takes five times as long, on either side."""

    parts_s: list[float]
    launch_s: float
    now_s: float = 0.0
    """The host's time."""
    idle_s: float = 0.0
    """The time at which the device has nothing more to do."""
    uploaded_s: float = 0.0
    num_steps: int = 0

    @classmethod
    def installed(cls, parts_ms: list[float], launch_ms: float, monkeypatch: pytest.MonkeyPatch) -> "VirtualGpu":
        """The GPU and the clock of `step_timing`."""
        gpu = cls([1e-3 * ms for ms in parts_ms], 1e-3 * launch_ms)
        cuda = SimpleNamespace(Event=gpu.event, _sleep=gpu.sleep, synchronize=gpu.synchronize)
        monkeypatch.setattr("kimi_backend.runners.step_timing.torch", SimpleNamespace(cuda=cuda))
        clock = SimpleNamespace(perf_counter=lambda: gpu.now_s)
        monkeypatch.setattr("kimi_backend.runners.step_timing.time", clock)
        return gpu

    def launch(self) -> SimpleNamespace:
        slower = 1 if self.num_steps else 5
        self.num_steps += 1
        self.now_s = max(self.now_s, self.uploaded_s) + slower * self.launch_s
        for part_s in self.parts_s:
            self.uploaded_s = max(self.idle_s, self.now_s)
            self.idle_s = self.uploaded_s + slower * part_s
        return SimpleNamespace(wait=self.synchronize)

    def synchronize(self, device: torch.device | None = None) -> None:
        self.now_s = max(self.now_s, self.idle_s)

    def sleep(self, cycles: int) -> None:
        self.idle_s = max(self.idle_s, self.now_s) + cycles / 2e9

    def event(self, *, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace(at_s=math.nan)
        event.record = lambda: setattr(event, "at_s", max(self.idle_s, self.now_s))
        event.elapsed_time = lambda end: 1e3 * (end.at_s - event.at_s)
        return event


@pytest.mark.parametrize(
    ("parts_ms", "launch_ms", "counts"),
    [
        ([20.1], 0.5, [3, 3]),  # three, however long they are
        ([2.1], 0.3, [3, 3]),  # five would fill the burst; two alone are none
        ([1.7], 0.3, [6, 6]),
        ([0.3], 0.3, [20, 20]),
        ([0.1], 0.5, [20, 20]),  # shorter than its launch
        # Longer, and the next one is launched in its last part: what its launch takes is not known at first.
        ([1.0, 0.1], 0.9, [3, 6]),
    ],
)
def test_no_step_waits_for_the_host_while_it_is_timed(
    parts_ms: list[float], launch_ms: float, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, took_s = VirtualGpu.installed(parts_ms, launch_ms, monkeypatch), 0.0
    for count in counts:
        started_s, before = gpu.now_s, gpu.num_steps
        assert step_seconds(gpu.launch, CUDA, 0.012) == pytest.approx(1e-3 * sum(parts_ms))
        assert gpu.num_steps - before == count
        took_s = gpu.now_s - started_s
    assert took_s == pytest.approx(1e-3 * counts[-1] * (sum(parts_ms) + launch_ms))  # it rests for no longer


@pytest.mark.parametrize(("num_steps", "expected_ms"), [(3, 2.5), (8, 6.5)])
def test_the_second_half_of_a_burst_counts(num_steps: int, expected_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes a millisecond longer than the one before."""
    gpu = VirtualGpu.installed([], 0.3, monkeypatch)

    def launch() -> SimpleNamespace:
        gpu.parts_s = [1e-3 * (gpu.num_steps + 1)]
        return gpu.launch()

    assert run_burst(launch, CUDA, num_steps)[0] == pytest.approx(1e-3 * expected_ms)


def test_on_a_cpu_a_step_takes_no_longer_than_a_larger_one_did(counted: list[int]) -> None:
    """Here the larger ones, which come last, are the slower ones in one pass and the faster ones in another."""
    target, _ = runner_pair(SETTING, "mla", None)
    steps = target.measure_costs().step_us
    assert all(left <= right for row in steps for left, right in itertools.pairwise(row))
    assert all(left <= right for rows in zip(*steps, strict=True) for left, right in itertools.pairwise(rows))


@pytest.mark.parametrize("is_captured", [False, True])
def test_rows_have_keys_of_their_own(is_captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose rows each read the keys of their sequence is timed right in shapes that are not run."""

    def us_of(query_lens: np.ndarray, contexts: np.ndarray) -> float:
        return float(1000 + 50 * query_lens.sum() + (contexts * (0.3 + 0.2 * query_lens)).sum())

    def seconds_of(launch, device: torch.device, burst_s: float) -> float:  # type: ignore[no-untyped-def]
        rows = launch.args[0]
        return 1e-6 * us_of(rows.query_lens, rows.seq_lens - rows.query_lens + 1)

    monkeypatch.setattr("kimi_backend.runners.step_timing.step_seconds", seconds_of)
    limits = RunnerLimits(max_num_batched_tokens=256, max_num_seqs=16, max_model_len=512)
    setting = Setting(kernels=KernelSet.plain(), limits=limits, num_blocks=1024)
    target, _ = runner_pair(setting, "mla", PlainRecorder() if is_captured else None)
    times = StepTimes(target.measure_costs())
    for num_seqs, num_rows, context in itertools.product((1, 4, 16), (1, 3, 8), (65, 260, 480)):
        lens = np.full(num_seqs, num_rows)
        parts = times.fixed_and_variable(num_seqs, num_seqs * num_rows, num_rows, context)
        expected_us = us_of(lens, np.full(num_seqs, context))
        assert 1e6 * float(sum(parts)) == pytest.approx(expected_us, rel=1e-6)


def test_a_step_that_was_held_up_makes_no_other_step_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first proposal's time is what one row takes longer with it: here longer than any step of more rows."""

    def seconds_of(launch, device: torch.device, burst_s: float) -> float:  # type: ignore[no-untyped-def]
        rows, num_proposals = launch.args
        return 0.003 if (num_proposals, rows.query_lens.max()) == (1, 1) else 0.001 + 0.0002 * num_proposals

    monkeypatch.setattr("kimi_backend.runners.step_timing.step_seconds", seconds_of)
    _, draft = runner_pair(SETTING, "mla31", PlainRecorder())
    costs = draft.measure_costs()
    assert {value for grid in (costs.step_us, costs.padded_us) for row in grid for value in row} == {1000.0}
    assert all(row[0] == pytest.approx(2000) for row in costs.proposals_us)


@pytest.fixture
def costs_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CostFile:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return CostFile.of("target", ServingSettings(), "a model", torch.device("cpu"))


def test_costs_are_kept_under_all_that_they_depend_on(costs_of: CostFile, tmp_path: Path) -> None:
    assert costs_of.read() is None
    costs = linear_costs(3, 1)
    costs_of.write(costs)
    assert costs_of.read() == costs
    assert costs_folder() == tmp_path / "kimi_step_costs"
    cpu = torch.device("cpu")
    others = [
        CostFile.of("draft", ServingSettings(), "a model", cpu),
        CostFile.of("target", ServingSettings(), "another model", cpu),
        CostFile.of("target", ServingSettings(max_num_seqs=8), "a model", cpu),
        CostFile({**costs_of.about, "code": "another"}),
        CostFile({**costs_of.about, "device": "another"}),
    ]
    assert all(other.read() is None for other in others)
    assert CostFile.of("target", ServingSettings(log_level="DEBUG"), "a model", cpu).read() == costs


@pytest.mark.parametrize("text", ["", "{}", '{"about": {}, "costs": {}}', "[1]", '{"about": 1, "costs": null}'])
def test_a_damaged_file_is_measured_again(costs_of: CostFile, text: str) -> None:
    costs_of.write(linear_costs(3, 1))
    costs_of.path.write_text(text)
    assert costs_of.read() is None


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(
    costs_of: CostFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kimi_step_costs").write_text("a file")
    costs_of.write(linear_costs(3, 1))
    assert "not kept" in caplog.text
    assert costs_of.read() is None


def test_a_file_is_readable_by_people(costs_of: CostFile) -> None:
    costs_of.write(linear_costs(3, 1))
    content = json.loads(costs_of.path.read_text())
    assert content["about"]["role"] == "target"
    assert StepCosts.from_json(json.dumps(content["costs"])) == linear_costs(3, 1)


@pytest.mark.parametrize(("waited_s", "is_kept"), [(0.24, True), (0.26, False)])
def test_what_a_busy_machine_took_is_not_kept(
    waited_s: float,
    is_kept: bool,
    counted: list[int],
    costs_of: CostFile,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its threads ran for a second and waited for a processor beside that."""
    scheduled = iter([(5.0, 2.0), (6.0, 2.0 + waited_s)])
    monkeypatch.setattr("kimi_backend.runners.step_timing.scheduled_seconds", lambda: next(scheduled))
    target, _ = runner_pair(SETTING, "mla", None)
    target._cost_file = costs_of
    costs = target.measure_costs()
    assert costs_of.read() == (costs if is_kept else None)
    assert ("busy, 21 % of the time" in caplog.text) is not is_kept


def test_the_system_tells_how_long_threads_ran() -> None:
    before = scheduled_seconds()
    started = time.thread_time()
    while time.thread_time() < started + 0.05:
        pass
    ran_s, waited_s = (after - first for after, first in zip(scheduled_seconds(), before, strict=True))
    assert ran_s > 0.03 and waited_s >= 0


def test_a_card_is_known_with_its_limits_where_they_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(command: list[str], **options: object) -> SimpleNamespace:
        asked.append(command)
        if len(asked) > 1:
            raise FileNotFoundError("nvidia-smi")
        return SimpleNamespace(stdout="A card, 1, 700 W\n")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    monkeypatch.setattr("kimi_backend.runners.cost_file.subprocess.run", run)
    found = [machine(torch.device("cuda")) for _ in range(2)]
    assert [about["device"] for about in found] == ["A card, 1, 700 W", "A card"]
    assert asked[0][:2] == ["nvidia-smi", "--id=GPU-abc"]
    assert "power.limit" in asked[0][2]
    on_cpu = machine(torch.device("cpu"))
    assert on_cpu["torch"] == found[0]["torch"] == torch.__version__
    assert "cuda" not in on_cpu and on_cpu["device"].endswith(" cores")


def test_the_shapes_that_a_cpu_times() -> None:
    limits = RunnerLimits(max_num_batched_tokens=40, max_num_seqs=16, max_model_len=128, max_speculative_tokens=4)
    shapes = shapes_of(limits, is_captured=False, is_draft=False)
    assert [(shape.num_seqs, shape.num_rows) for shape in shapes if not shape.is_long] == [
        *((16, rows) for rows in (2, 1)),
        *((4, rows) for rows in (5, 4, 2, 1)),
        *((1, rows) for rows in (5, 4, 2, 1)),
    ]
    longs = [(shape.num_seqs, shape.num_rows) for shape in shapes if shape.is_long]
    assert longs == [(16, 1), (4, 4), (4, 1), (1, 5), (1, 1)]


def test_a_step_on_a_cpu_lasts_from_its_launch_to_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]

    class Step:
        def wait(self) -> None:
            now.append(now[-1] + 2)

    def launch() -> Step:
        now.append(now[-1] + 1)
        return Step()

    monkeypatch.setattr("kimi_backend.runners.step_timing.time", SimpleNamespace(perf_counter=lambda: now[-1]))
    assert step_seconds(launch, torch.device("cpu"), 1.0) == 3
