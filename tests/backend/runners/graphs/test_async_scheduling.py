"""Steps that embed the tokens which the step before left on the device: the same texts as with tokens by way of the
host, from pools full of NaN. tests/backend/runners/graphs/test_on_gpu.py does it with CUDA graphs."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kimi_backend.errors import InvalidRequestError
from kimi_backend.runners.graphs.recorder import Recorder
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.scheduler.sequence import Finish
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.plan import TargetPlan
from kimi_backend.types.request import EndCause, FinishReason, GenerateRequest
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.token_table import plain
from support.captured_runners import Setting, runner_pair
from support.engine_runs import EngineHarness
from support.plain_recorder import PlainRecorder
from support.random_requests import requests_of_every_k
from support.speculative_loop import SpeculativeLoop

SETTING = Setting(kernels=KernelSet.plain())
EOS = 3


def target_with(recorder: Recorder | None) -> TargetRunner:
    return runner_pair(SETTING, "mla31", recorder)[0]


def run(
    async_scheduling: bool, given: list[GenerateRequest], change: Callable[[EngineHarness, int], None] | None = None
) -> tuple[EngineHarness, int]:
    """The engine, and how many steps were launched behind another one."""
    target = target_with(PlainRecorder())
    launch, num_behind = target.launch, 0

    def counted(plan: TargetPlan) -> object:
        nonlocal num_behind
        num_behind += bool((plan.num_given == 0).any())
        return launch(plan)

    target.launch = counted  # type: ignore[method-assign, assignment]
    settings = SchedulerSettings(max_num_seqs=6, max_num_batched_tokens=64, async_scheduling=async_scheduling)
    harness = EngineHarness(target, None, settings, eos_token_ids={EOS})
    for request in given:
        harness.add(request)
    harness.run(each_step=None if change is None else lambda step: change(harness, step))
    return harness, num_behind


def texts(harness: EngineHarness) -> list[list[int]]:
    return [outcome.token_ids for outcome in harness.outcomes]


def test_the_same_texts_as_in_lockstep() -> None:
    given = requests_of_every_k(8, fewest_tokens=20)
    lockstep, none = run(False, given)
    ahead, num_behind = run(True, given)
    assert none == 0
    assert num_behind > 50
    assert texts(ahead) == texts(lockstep)
    reasons = {outcome.finishes[0].reason for outcome in ahead.outcomes}
    assert FinishReason.ERROR not in reasons


def test_the_same_texts_where_others_leave_and_start_again() -> None:
    """Cancelled and preempted with a step in flight; their blocks, which it writes, go to others."""
    given = requests_of_every_k(8, fewest_tokens=20)

    def change(harness: EngineHarness, step: int) -> None:
        running = harness.core.scheduler.running
        if step % 5 == 3 and running:
            harness.core.scheduler.preempt(running[0])
        if step == 12:
            harness.core.end(running[-1], Finish(FinishReason.CANCELLED, error="test", cause=EndCause.CLIENT))

    lockstep, _ = run(False, given)
    ahead, num_behind = run(True, given, change)
    assert num_behind > 20
    assert ahead.core.scheduler.num_preemptions > 3
    cancelled = 0
    for one, expected in zip(ahead.outcomes, texts(lockstep), strict=True):
        cancelled += (one.finishes != [] and one.token_ids != expected) or not one.finishes
        assert one.token_ids == expected[: len(one.token_ids)]
    assert cancelled == 1


@pytest.mark.parametrize("fault", ["no token", "another's token", "last step's"])
def test_a_wrong_token_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults in what a step leaves for the next."""
    given = requests_of_every_k(8, fewest_tokens=20)
    lockstep, _ = run(False, given)
    store = plain.store_drawn

    def planted(
        output_token_ids: torch.Tensor, accepted: torch.Tensor, table_rows: torch.Tensor, drawn: torch.Tensor
    ) -> None:
        if fault == "no token":
            store(torch.zeros_like(output_token_ids), accepted, table_rows, drawn)
        elif fault == "another's token":
            store(output_token_ids.roll(1, 0), accepted, table_rows, drawn)

    monkeypatch.setattr(plain, "store_drawn", planted)
    ahead, num_behind = run(True, given)
    assert num_behind > 20
    assert texts(ahead) != texts(lockstep)


def decode_plan(target: TargetRunner) -> TargetPlan:
    """A decode step of three sequences behind one that has run."""
    loop = SpeculativeLoop(target, None, [[8, 9, 10], [11, 12], [13]], 0)
    loop.step()
    step = loop.step()
    plan, drawn = step.target_plan, step.target_reply.output_token_ids[:, 0].astype(np.int32)
    rows = replace(plan.rows, token_ids=drawn, seq_lens=plan.rows.seq_lens + 1)
    return replace(plan, step_id=plan.step_id + 1, rows=rows)


def behind(plan: TargetPlan, index: list[int]) -> TargetPlan:
    rows = plan.rows
    return replace(
        plan,
        step_id=plan.step_id + 1,
        rows=replace(
            rows,
            token_ids=np.zeros(len(index), np.int32),
            query_lens=rows.query_lens[index],
            seq_lens=rows.seq_lens[index] + 1,
            block_table=rows.block_table[index],
        ),
        table_rows=plan.table_rows[index],
        num_given=np.zeros(len(index), np.int32),
        num_sampled_rows=plan.num_sampled_rows[index],
        sampling=type(plan.sampling).plain(len(index)),
        wants_aux=plan.wants_aux[index],
    )


@pytest.mark.parametrize("is_captured", [True, False])
def test_two_steps_in_flight_and_their_replies(is_captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the first step's sequences, in another order; also where no bucket holds the second."""
    target, plain = target_with(PlainRecorder()), target_with(None)
    first = decode_plan(target)
    expected_first = plain.launch(decode_plan(plain)).wait()
    second = behind(first, [2, 0])
    pending = [target.launch(first)]
    if not is_captured:
        monkeypatch.setattr(target._graphs, "find", lambda plan: None)
    pending.append(target.launch(second))
    replies = [each.wait() for each in pending]
    np.testing.assert_array_equal(replies[0].output_token_ids, expected_first.output_token_ids)
    tokens = expected_first.output_token_ids[[2, 0], 0].astype(np.int32)
    known = replace(second, rows=replace(second.rows, token_ids=tokens), num_given=second.rows.query_lens)
    expected_second = plain.launch(known).wait()
    np.testing.assert_array_equal(replies[1].output_token_ids, expected_second.output_token_ids)
    assert not replies[1].seq_status.any()


def test_a_plan_can_be_run_again_alone_given_its_table() -> None:
    """A launched step of both kinds: with the table as it was, it gives the same reply bit for bit."""
    target, draft = runner_pair(SETTING, "mla31", PlainRecorder())
    loop = SpeculativeLoop(target, draft, [[8, 9, 10], [11, 12], [13]], [3, 1, 2], in_table=True)
    loop.step()
    assert target.table is not None and draft.table is target.table
    kept = target.table.drawn.clone(), target.table.proposed.clone()
    step = loop.step()
    assert step.target_plan.reads_table and step.target_plan.draft_step
    target.table.drawn.random_(0, 90)
    target.table.proposed.random_(0, 90)
    for half, found in zip((target.table.drawn, target.table.proposed), kept, strict=True):
        half.copy_(found)
    again = target.launch(step.target_plan).wait()
    for name in ("output_token_ids", "num_accepted_tokens", "seq_status", "draft_status"):
        np.testing.assert_array_equal(getattr(again, name), getattr(step.target_reply, name), err_msg=name)


def test_a_runner_without_a_table_says_so() -> None:
    plan = decode_plan(target_with(PlainRecorder()))
    with pytest.raises(InvalidRequestError, match="tokens of the token table wanted, but this runner has none"):
        target_with(None).launch(behind(plan, [0]))
    target = target_with(PlainRecorder())
    decode_plan(target)
    with pytest.raises(InvalidRequestError, match=r"plan table_rows\[0\]: 8 given, 0 to 7 allowed"):
        target.launch(replace(behind(plan, [0]), table_rows=np.array([8], np.int32)))
    with pytest.raises(InvalidRequestError, match=r"plan num_given\[0\]: -1 given, 0 to 1 \(of query_lens\) allowed"):
        target.launch(replace(behind(plan, [0]), num_given=np.array([-1], np.int32)))
    with pytest.raises(InvalidRequestError, match=r"plan num_given: shape \[1\] given, \[3\] allowed"):
        target.launch(replace(plan, num_given=np.array([0], np.int32)))
