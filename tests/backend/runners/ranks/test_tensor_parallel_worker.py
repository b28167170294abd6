"""Another rank does what rank 0 does: the same KV, bit for bit, after every kind of step."""

import gc
import random
import threading
import weakref
from dataclasses import replace

import pytest
import torch

from kimi_backend.errors import InvalidRequestError
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.ranks import worker_processes
from kimi_backend.runners.ranks.worker_processes import _collect_captures
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.request import GenerateRequest, SamplingParams
from kimi_kernels.kernel_set import KernelSet
from support.captured_runners import Setting, runner_pair
from support.engine_runs import EngineHarness
from support.loopback_workers import LoopbackWorkers
from support.plain_recorder import PlainRecorder
from support.random_requests import random_requests
from support.waiting import PATIENCE_S

SETTING = Setting(kernels=KernelSet.plain())


def two_ranks(*, captures: bool) -> tuple[list[tuple[TargetRunner, DraftRunner]], LoopbackWorkers]:
    pairs = [runner_pair(SETTING, "mla31", PlainRecorder() if captures else None, num_regions=1) for _ in range(2)]
    workers = LoopbackWorkers(*pairs[1])
    for runner in pairs[0]:
        runner.workers = workers
    return pairs, workers


def assert_same_pools(pairs: list[tuple[TargetRunner, DraftRunner]]) -> None:
    for ours, theirs in zip(*pairs, strict=True):
        assert torch.equal(ours._pool.tensor.nan_to_num(9e9), theirs._pool.tensor.nan_to_num(9e9))


def plain_requests(count: int, k: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=str(index),
            prompt_token_ids=tuple(range(1 + index, 12 + 2 * index)),
            sampling=SamplingParams(max_tokens=20, temperature=float(index % 2), seed=index, ignore_eos=True),
            num_speculative_tokens=k,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("captures", "k", "expected"),
    [
        (False, 3, {"verify", "draft"}),
        (True, 3, {"verify", "draft", "overlapped"}),
        (True, 0, {"verify", "behind"}),
    ],
)
def test_every_kind_of_step_leaves_the_same_kv(captures: bool, k: int, expected: set[str]) -> None:
    pairs, workers = two_ranks(captures=captures)
    target, draft = pairs[0]
    harness = EngineHarness(target, draft if k else None, SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=64))
    for request in plain_requests(6, k):
        harness.add(request)
    harness.run(each_step=lambda _: assert_same_pools(pairs))
    assert not workers.problems
    assert expected <= set(workers.steps), workers.steps
    tables = [pair[1].table for pair in pairs]
    assert not captures or torch.equal(tables[0].proposed[:-1], tables[1].proposed[:-1])  # type: ignore[union-attr]


@pytest.mark.parametrize("captures", [False, True])
def test_every_sampling_feature(captures: bool) -> None:
    pairs, workers = two_ranks(captures=captures)
    harness = EngineHarness(*pairs[0], SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=64))
    for request in random_requests(random.Random(3), 16, pairs[0][0].describe().vocab_size):
        harness.add(request)
    harness.run(each_step=lambda _: assert_same_pools(pairs))
    assert not workers.problems


def test_a_bad_plan_fails_before_anybody_is_told() -> None:
    pairs, workers = two_ranks(captures=False)
    plans = []
    launch = pairs[0][0].launch
    pairs[0][0].launch = lambda plan: (plans.append(plan), launch(plan))[1]  # type: ignore[method-assign]
    harness = EngineHarness(pairs[0][0], None)
    harness.add(plain_requests(1, 0)[0])
    harness.run()
    told = workers.steps["verify"]
    bad = replace(plans[0], rows=replace(plans[0].rows, token_ids=plans[0].rows.token_ids + 10**6))
    with pytest.raises(InvalidRequestError, match="token_ids"):
        launch(bad)
    assert workers.steps["verify"] == told


def test_dropped_captures_are_gone_before_a_rank_leaves() -> None:
    """They hold the collectives that they call, and NCCL's leaving waits for them. Servers freeze what is loaded."""
    (pair, _), _ = two_ranks(captures=True)
    captured = [weakref.ref(runner._graphs) for runner in pair]  # type: ignore[type-var]
    gc.collect()
    gc.freeze()
    for runner in pair:
        runner.drop_captures()
    _collect_captures()
    assert [reference() for reference in captured] == [None, None]


def test_a_lost_worker_is_told_once_by_whoever_notices_first(monkeypatch, capsys):
    """Its watch and the step that failed both end the process."""
    has_exited, may_go_on = threading.Event(), threading.Event()

    def exit_slowly(code: int) -> None:
        has_exited.set()
        may_go_on.wait()

    monkeypatch.setattr(worker_processes, "_ENDING", threading.Lock())
    monkeypatch.setattr(worker_processes.os, "_exit", exit_slowly)
    first, second = (threading.Thread(target=worker_processes.end_process, args=(name,), daemon=True) for name in "ab")
    first.start()
    assert has_exited.wait(PATIENCE_S)
    second.start()
    second.join(0.1)
    may_go_on.set()
    first.join(PATIENCE_S)
    assert capsys.readouterr().err == "tensor parallel: a; this process ends\n"
