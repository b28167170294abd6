"""Steps in buckets, with padding and static arrays, against the same steps without. Here a replay is the recorded
function itself; tests/backend/runners/graphs/test_on_gpu.py replays CUDA graphs."""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.runners.graphs.recorder import EagerRecorder, Recorder, Run
from kimi_backend.runners.graphs.static_arrays import StaticArrays
from kimi_backend.scheduler.batch_table import BatchTable
from kimi_backend.scheduler.plan_builder import store_proposals
from kimi_backend.types.plan import TargetPlan
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.token_table import plain
from support.captured_runners import Setting, runner_pair
from support.captured_steps import assert_equal_steps, step_in_order
from support.masked_loop import MaskedLoop
from support.plain_recorder import PlainRecorder
from support.speculative_loop import SpeculativeLoop

KINDS = ["mla31", "mla", "mha"]
SETTING = Setting(kernels=KernelSet.plain())
GENERATOR = np.random.default_rng(0)


def prompts(count: int) -> list[list[int]]:
    return [GENERATOR.integers(0, 96, GENERATOR.integers(3, 20)).tolist() for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("temperature", "ks", "recorder"),
    [
        (0.0, [3], EagerRecorder()),
        (1.0, [1, 7, 2], PlainRecorder()),
        (0.0, [3, 3, 3, 3, 3], PlainRecorder()),
        (1.0, [0, 4, 5, 1, 7, 2, 6], PlainRecorder()),
    ],
)
def test_steps_in_buckets_give_the_same_bits(kind: str, temperature: float, ks: list[int], recorder: Recorder) -> None:
    texts = prompts(len(ks))
    loops = [
        SpeculativeLoop(*runner_pair(SETTING, kind, given), texts, list(ks), temperature=temperature, seed=5)
        for given in (None, recorder)
    ]
    for _ in range(6):
        assert_equal_steps(*(loop.step(12) for loop in loops))


@pytest.mark.parametrize("kind", KINDS)
def test_recording_leaves_no_trace(kind: str) -> None:
    """Steps of padding alone write nothing."""
    for runner in runner_pair(SETTING, kind, EagerRecorder()):
        assert runner.num_warm_up_steps > 10
        assert runner._pool.tensor.isnan().all()


class CompilingRecorder(EagerRecorder):
    """Prepares as a GPU does: kernels compile and write nothing, so what they would work out stays as it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def record(self, run: Run) -> Run:
        run()
        return run

    def prepare(self, runs: Iterable[Run]) -> None:
        with self._monkeypatch.context() as patch:
            for name in ("read_tokens", "store_drawn", "read_drawn", "plan_steps", "store_proposals"):
                patch.setattr(plain, name, lambda *_, **__: None)
            super().prepare(runs)


def test_what_kernels_would_work_out_is_a_possible_index_where_they_only_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever another bucket's step has left in the arena that both share."""
    upload = StaticArrays.upload

    def leave_garbage(self: StaticArrays) -> None:
        upload(self)
        for array in self.host.values():
            array[...] = 2**30

    monkeypatch.setattr(StaticArrays, "upload", leave_garbage)
    recorder = CompilingRecorder(monkeypatch)
    assert all(runner.num_warm_up_steps for runner in runner_pair(SETTING, "mla31", recorder))


def test_a_draft_step_that_may_propose_and_then_has_no_room_proposes_nothing() -> None:
    """A request's last tokens are such, where more was accepted than needed: an empty row of each that might have."""
    texts, replies = prompts(2), []
    for recorder in (None, PlainRecorder()):
        loop = SpeculativeLoop(*runner_pair(SETTING, "mla31", recorder), texts, 2)
        loop.step()
        step = loop.step()
        assert step.draft_plan is not None and loop._draft is not None
        plan = replace(step.draft_plan, aux=step.target_reply.aux, room=np.zeros(2, np.int32))
        replies.append(loop._draft.launch(plan).wait())
    for reply in replies:
        assert reply.draft_token_ids is not None
        assert reply.draft_token_ids.shape == (2, 0)
        sequences: list[Any] = [SimpleNamespace(row=row, uses_draft=True, num_draft_tokens=9) for row in range(2)]
        store_proposals(BatchTable(4, 4), sequences, plan, plan.num_wanted, reply, 96)
        assert [sequence.num_draft_tokens for sequence in sequences] == [0, 0]


def test_steps_run_in_buckets_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = runner_pair(SETTING, "mla31", PlainRecorder())
    assert (target.depth, draft.depth) == (2, 1)
    loop = SpeculativeLoop(target, draft, prompts(3), 3)
    loop.step()

    def refuse(*args: object) -> None:
        raise AssertionError("ran eagerly")

    monkeypatch.setattr(target, "_launch_eagerly", refuse)
    monkeypatch.setattr(draft, "_launch_eagerly", refuse)
    for _ in range(3):
        loop.step()


@pytest.mark.parametrize("kind", KINDS)
def test_an_extension_that_no_bucket_holds_is_followed_by_proposals_in_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, loops = prompts(3), []
    for recorder in (None, PlainRecorder()):
        target, draft = runner_pair(SETTING, kind, recorder)
        if recorder is not None:
            assert draft._graphs is not None
            monkeypatch.setattr(draft._graphs, "extension_bucket", lambda plan: None)
            monkeypatch.setattr(draft, "_launch_eagerly", None)
        loops.append(SpeculativeLoop(target, draft, texts, 3, temperature=1.0, seed=5))
    for _ in range(4):
        assert_equal_steps(*(loop.step() for loop in loops))


@pytest.mark.parametrize("in_table", [False, True])
def test_a_draft_that_only_extends_runs_in_a_bucket(in_table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy may let nobody propose for a while; then proposals go on from there."""
    texts, loops = prompts(3), []
    for recorder in (None, PlainRecorder()):
        target, draft = runner_pair(SETTING, "mla31", recorder)
        loops.append(SpeculativeLoop(target, draft, texts, 0, in_table=in_table and recorder is not None))
        loops[-1].step()
    monkeypatch.setattr(loops[1]._draft, "_launch_eagerly", None)
    for k in (0, 0, 2, 0, 2):
        steps = []
        for loop in loops:
            for sequence in loop.sequences:
                sequence.num_speculative_tokens = k
            steps.append(loop.step())
        assert steps[0].target_reply.output_token_ids.tolist() == steps[1].target_reply.output_token_ids.tolist()
        if not in_table:
            assert_equal_steps(*steps)
    pools = [loop._draft._pool.tensor.nan_to_num(nan=7.0) for loop in loops]  # type: ignore[union-attr]
    assert torch.equal(*pools)


def test_a_draft_that_only_extends_says_who_failed() -> None:
    loops = []
    for recorder in (None, PlainRecorder()):
        loop = SpeculativeLoop(*runner_pair(SETTING, "mla31", recorder), [[5, 6, 7], [8, 9, 10, 11]], 0)
        loop.step()
        loop._draft._pool.tensor[:, loop.sequences[1].draft_blocks[0]] = float("nan")  # type: ignore[union-attr]
        loops.append(loop)
    replies = [loop.step().draft_reply for loop in loops]
    assert [reply.seq_status.tolist() for reply in replies if reply is not None] == [[0, 1], [0, 1]]


def test_a_draft_in_another_process_reads_tensors() -> None:
    texts = prompts(3)
    loops = [
        SpeculativeLoop(*runner_pair(SETTING, "mla31", recorder, shares_buffer=False), texts, 3)
        for recorder in (None, PlainRecorder())
    ]
    for _ in range(4):
        assert_equal_steps(*(loop.step() for loop in loops))


def test_a_new_batch_in_another_order_reads_its_own_blocks() -> None:
    """The static block table holds what the step before left there."""
    texts = prompts(4)
    loops = [
        SpeculativeLoop(*runner_pair(SETTING, "mla31", recorder), texts, [3, 1, 2, 7])
        for recorder in (None, PlainRecorder())
    ]
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 1], [1, 3, 2, 0], [0]):
        assert_equal_steps(*(step_in_order(loop, order) for loop in loops))


class ProcessedLoop(SpeculativeLoop):
    """Every sequence of the target has a bias and wants log-probabilities."""

    def _target_plan(self, rows: list[list[int]]) -> TargetPlan:
        plan = super()._target_plan(rows)
        count = len(plan.sampling.temperature)
        biased = replace(
            plan.sampling,
            bias_offsets=np.arange(count + 1, dtype=np.int32),
            bias_ids=np.full(count, 7, np.int32),
            bias_values=np.full(count, 3.0, np.float32),
        )
        return replace(plan, sampling=biased, num_logprobs=2)


def test_processors_and_logprobs_follow_the_captured_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = prompts(3)
    loops = [
        ProcessedLoop(*runner_pair(SETTING, "mla31", recorder), texts, [3, 1, 2])
        for recorder in (None, PlainRecorder())
    ]
    assert_equal_steps(*(loop.step() for loop in loops))
    monkeypatch.setattr(loops[1]._target, "_launch_eagerly", None)
    for _ in range(3):
        steps = [loop.step() for loop in loops]
        assert_equal_steps(*steps)
        assert steps[0].target_reply.logprobs is not None


def test_masks_reach_the_captured_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that mask some rows, and steps behind them that mask none."""
    texts = prompts(4)
    loops = [
        MaskedLoop(*runner_pair(SETTING, "mla31", recorder), texts, [3, 0, 7, 2], temperature=1.0)
        for recorder in (None, PlainRecorder())
    ]
    assert_equal_steps(*(loop.step() for loop in loops))
    for name in ("_launch_eagerly", "_sample"):
        monkeypatch.setattr(loops[1]._target, name, None)
    are_masked = set()
    for _ in range(7):
        steps = [loop.step() for loop in loops]
        assert_equal_steps(*steps)
        are_masked.add(steps[0].target_plan.logit_mask is not None)
    assert are_masked == {True, False}


class OneTokenLoop(SpeculativeLoop):
    """Every draw may be one token only: 40 and its row among the sampled ones."""

    def _target_plan(self, rows: list[list[int]]) -> TargetPlan:
        plan = super()._target_plan(rows)
        masked = np.arange(plan.num_sampled_rows.sum(), dtype=np.int32)
        masks = np.zeros((len(masked), -(-self._target.describe().vocab_size // 32)), np.int32)
        masks[masked, (40 + masked) // 32] = 1 << (40 + masked) % 32
        return replace(plan, logit_mask=masks, masked_rows=masked)


@pytest.mark.parametrize("recorder", [None, PlainRecorder()])
def test_masks_reach_the_last_row_of_a_short_prompt(
    monkeypatch: pytest.MonkeyPatch, recorder: PlainRecorder | None
) -> None:
    """Prompts of a few rows run in captured steps too, and draw at the last row alone."""
    texts = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
    loop = OneTokenLoop(*runner_pair(SETTING, "mla31", recorder), texts, [3, 0, 2, 1])
    if recorder is not None:
        monkeypatch.setattr(loop._target, "_launch_eagerly", None)
    reply = loop.step().target_reply
    assert reply.output_token_ids.tolist() == [[40], [41], [42], [43]]
