"""Steps of two processes that wait for each other's semaphores: whatever becomes of either, the text is the same.

On a CPU whoever queues a wait waits itself, so both runners may be in this process, in two threads. The streams' part
is tested on a GPU (`tests/backend/runners/test_stream_memory.py`).
"""

import itertools
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.errors import ModelUnavailableError
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.hand_over import step_sync
from kimi_backend.runners.hand_over.semaphores import PROMISED, TARGET_PID, VERIFIED, WAITED
from kimi_backend.runners.hand_over.step_sync import DraftSync, TargetSync
from kimi_backend.runners.hand_over.token_table import TokenTable
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.ranks.workers import NO_WORKERS, Workers
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.serving import draft_server, target_server, tensor_names
from kimi_backend.serving.aux_sharing import AuxReceiver
from kimi_backend.serving.aux_transfer import AuxTransfer, SemaphoreTransfer
from kimi_backend.serving.bls_models import BlsDraft, BlsTarget
from kimi_backend.serving.draft_server import DraftServer
from kimi_backend.serving.target_server import TargetServer
from kimi_backend.types.plan import AuxHandle, DraftPlan, RowPlan, SamplingPlan, TargetPlan
from kimi_backend.types.request import GenerateRequest
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import PLACEHOLDER_TOKEN_ID
from kimi_kernels.synthetic_sets import with_synthetic_acceptance
from support.captured_runners import Setting, runner_pair
from support.engine_runs import EngineHarness
from support.loopback_server import SECRET, LoopbackServer
from support.loopback_workers import LoopbackWorkers
from support.plain_recorder import PlainRecorder
from support.random_requests import requests_of_every_k
from support.waiting import PATIENCE_S, wait_for

SETTING = Setting(kernels=KernelSet.plain())
ACCEPTING = Setting(kernels=with_synthetic_acceptance(KernelSet.plain(), 2.5, torch.device("cpu")))
"""Draft tokens become the text: these models agree on none by themselves."""

LET_GO = "a step waits no longer for the other runner"
Outcomes = list[tuple[list[int], list[tuple[int, int]]]]
Lockstep = Callable[[Setting], Outcomes]


class FoundBuffer:
    """Stands in for `OpenedAuxBuffer`."""

    def __init__(self, buffers: dict[bytes, AuxBuffer], exported: bytes) -> None:
        self.exported, self.buffer = exported, buffers[exported]

    def close(self) -> None:
        return None


class Pair:
    """Both runners behind a loopback, the aux buffer between them found in a table."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, setting: Setting, kind: str = "mla31") -> None:
        self.loopback = LoopbackServer()
        self._setting, self._kind = setting, kind
        self._buffers: dict[bytes, AuxBuffer] = {}
        self.overlapped: list[bool] = []
        """One entry a draft step: whether it was launched before it was known what its verify accepted."""
        monkeypatch.setattr(target_server, "offer_aux_buffer", self._offer)
        monkeypatch.setattr(
            draft_server,
            "AuxReceiver",
            lambda device, aux_transfer, **_: AuxReceiver(
                torch.device("cuda"), aux_transfer, lambda handle, _: FoundBuffer(self._buffers, handle)
            ),
        )
        self.start("kimi_target")
        self.start("eagle3_draft")

    def _offer(self, buffer: AuxBuffer | None, aux_transfer: str, *_: object) -> bytes | None:
        if buffer is None or aux_transfer == "tensor":
            return None
        handle = b"handle %d" % len(self._buffers)
        self._buffers[handle] = buffer
        return handle

    def start(self, model: str, aux_transfer: str = "auto", workers: Workers = NO_WORKERS) -> Any:
        """Load one runner, or load it again; returns it. workers: its other ranks."""
        target, draft = runner_pair(self._setting, self._kind, PlainRecorder(), shares_buffer=False, num_regions=1)
        if model in self.loopback.servers:
            self.loopback.servers[model].close()
        runner: Any = target if model == "kimi_target" else self._watched(draft)
        runner.workers = workers
        runner.table.is_split = True
        pb_utils = self.loopback.pb_utils
        if model == "kimi_target":
            self.loopback.servers[model] = TargetServer(runner, pb_utils, aux_transfer, secret=SECRET)
        else:
            self.loopback.servers[model] = DraftServer(
                runner, pb_utils, aux_transfer, secret=SECRET, has_semaphores=True
            )
        return runner

    def _watched(self, draft: Any) -> Any:
        launch = draft.launch

        def counted(plan: DraftPlan) -> Any:
            self.overlapped.append(bool(plan.num_drawn.any()))
            return launch(plan)

        draft.launch = counted
        return draft

    def runner(self, model: str) -> Any:
        return self.loopback.servers[model]._runner

    def engine(self, *, async_scheduling: bool = True, requests: list[GenerateRequest] | None = None) -> EngineHarness:
        aux, semaphores = AuxTransfer(), SemaphoreTransfer()
        harness = EngineHarness(
            BlsTarget(self.loopback.pb_utils, "kimi_target", aux, semaphores, secret=SECRET),
            BlsDraft(self.loopback.pb_utils, "eagle3_draft", aux, semaphores, secret=SECRET),
            SchedulerSettings(max_num_seqs=6, max_num_batched_tokens=64, async_scheduling=async_scheduling),
            eos_token_ids={3},
        )
        for request in requests or requests_of_every_k(8, fewest_tokens=12):
            harness.add(request)
        return harness


@pytest.fixture
def make_pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(setting: Setting = SETTING, kind: str = "mla31") -> Pair:
        pairs.append(Pair(monkeypatch, setting, kind))
        return pairs[-1]

    yield make
    for server in itertools.chain(*(pair.loopback.servers.values() for pair in pairs)):
        server.close()
    assert "kimi-semaphores" not in {thread.name for thread in threading.enumerate()}, "a closed server watches on"


@pytest.fixture(scope="module")
def lockstep() -> Lockstep:
    """The outcomes of such a pair when every step is waited for; each is run once."""
    found: dict[int, Outcomes] = {}

    def run(setting: Setting) -> Outcomes:
        if id(setting) not in found:
            with pytest.MonkeyPatch.context() as patch:
                pair = Pair(patch, setting)
                found[id(setting)] = outcomes(pair.engine(async_scheduling=False))
                assert not any(pair.overlapped)
                for server in pair.loopback.servers.values():
                    server.close()
        return found[id(setting)]

    return run


def outcomes(harness: EngineHarness, each_step: Callable[[int], None] | None = None) -> Outcomes:
    """Tokens and rounds."""
    harness.run(each_step=each_step)
    assert all(len(outcome.finishes) == 1 for outcome in harness.outcomes)
    return [(outcome.token_ids, outcome.rounds) for outcome in harness.outcomes]


def pass_time(engine: EngineHarness) -> None:
    """A runner that is lost is asked again after a while."""
    engine.clock.now += 0.5


def texts(found: Outcomes) -> list[list[int]]:
    return [tokens for tokens, _ in found]


@pytest.mark.parametrize("kind", ["mla31", "mha"])
def test_a_draft_in_another_process_overlaps_its_verify(make_pair: Callable[..., Pair], kind: str) -> None:
    """The text is made of what the draft proposes, so one wrong number shows."""
    waiting, overlapping = make_pair(ACCEPTING, kind), make_pair(ACCEPTING, kind)
    expected = outcomes(waiting.engine(async_scheduling=False))
    assert outcomes(overlapping.engine()) == expected
    assert not any(waiting.overlapped)
    assert sum(overlapping.overlapped) > 12
    assert overlapping.loopback.num_carrying(tensor_names.AUX_HIDDEN_STATES) == 0


def test_a_worker_that_is_there_before_its_verify_waits_for_it(
    make_pair: Callable[..., Pair], lockstep: Lockstep, caplog: pytest.LogCaptureFixture
) -> None:
    """And its verify does not wait for it: the two are sent side by side."""
    expected = lockstep(ACCEPTING)
    pair = make_pair(ACCEPTING)
    server = pair.loopback.servers["kimi_target"]
    run = server.run

    def run_late(requests: list[Any]) -> list[Any]:
        time.sleep(0.01)
        return run(requests)

    server.run = run_late  # type: ignore[method-assign]
    assert outcomes(pair.engine()) == expected
    assert LET_GO not in caplog.text
    assert sum(pair.overlapped) > 12


def test_a_verify_that_no_graph_holds_is_shown_by_the_host(make_pair: Callable[..., Pair], lockstep: Lockstep) -> None:
    expected = lockstep(ACCEPTING)
    pair = make_pair(ACCEPTING)
    pair.runner("kimi_target")._graphs.find = lambda plan: None
    assert outcomes(pair.engine()) == expected
    assert sum(pair.overlapped) > 12


def test_a_draft_step_that_no_graph_holds_reads_the_table_on_the_host(make_pair: Callable[..., Pair]) -> None:
    waiting, pair = make_pair(ACCEPTING), make_pair(ACCEPTING)
    for each in (waiting, pair):
        each.runner("eagle3_draft")._graphs.proposal_bucket = lambda plan: None
    expected = outcomes(waiting.engine(async_scheduling=False))
    assert outcomes(pair.engine()) == expected
    assert sum(pair.overlapped) > 12


@pytest.mark.parametrize("aux_transfer", ["tensor"])
def test_without_a_shared_buffer_everything_is_waited_for(
    make_pair: Callable[..., Pair], lockstep: Lockstep, aux_transfer: str
) -> None:
    expected = lockstep(ACCEPTING)
    pair = make_pair(ACCEPTING)
    pair.start("eagle3_draft", aux_transfer)
    assert outcomes(pair.engine()) == expected
    assert not any(pair.overlapped)
    assert pair.loopback.num_carrying(tensor_names.AUX_HIDDEN_STATES) > 10


def test_semaphores_that_cannot_be_opened_cost_nothing_but_time(
    make_pair: Callable[..., Pair],
    lockstep: Lockstep,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = lockstep(ACCEPTING)
    monkeypatch.setattr(
        "kimi_backend.runners.hand_over.semaphores.OwnSemaphores.handle", property(lambda self: b'{"shape": [9, 9]}')
    )
    pair = make_pair(ACCEPTING)
    assert outcomes(pair.engine()) == expected
    assert not any(pair.overlapped)
    assert "cannot be opened" in caplog.text


@pytest.mark.parametrize("draft_has_ranks", [True, False])
def test_runners_on_several_ranks_overlap_too(
    make_pair: Callable[..., Pair], lockstep: Lockstep, draft_has_ranks: bool
) -> None:
    """Rank 0 shares what it found in the other's half of the table: the other ranks come to the same KV, bit for
    bit."""
    expected = lockstep(ACCEPTING)
    pair = make_pair(ACCEPTING)
    other_target, other_draft = runner_pair(ACCEPTING, "mla31", PlainRecorder(), shares_buffer=False, num_regions=1)
    other_target.table.is_split = other_draft.table.is_split = True  # type: ignore[union-attr]
    workers = LoopbackWorkers(other_target, None), LoopbackWorkers(None, other_draft)
    workers[0].rank_0 = pair.start("kimi_target", workers=workers[0])
    workers[1]._worker._opened = FoundBuffer(pair._buffers, max(pair._buffers))  # type: ignore[assignment]
    workers[1].rank_0 = pair.start("eagle3_draft", workers=workers[1] if draft_has_ranks else NO_WORKERS)
    assert outcomes(pair.engine()) == expected
    assert not workers[0].problems and not workers[1].problems
    assert sum(pair.overlapped) > 10
    assert same_kv(pair.runner("kimi_target"), other_target)
    if draft_has_ranks:
        assert workers[1].steps["overlapped"] > 10
        assert same_kv(pair.runner("eagle3_draft"), other_draft)


def same_kv(left: Any, right: Any) -> bool:
    return torch.equal(left._pool.tensor.nan_to_num(9e9), right._pool.tensor.nan_to_num(9e9))


@pytest.mark.parametrize("model", ["kimi_target", "eagle3_draft"])
def test_a_restarted_runner_overlaps_again(
    make_pair: Callable[..., Pair], lockstep: Lockstep, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = texts(lockstep(SETTING))
    pair, before = make_pair(), 0
    engine = pair.engine()

    def restart(step: int) -> None:
        nonlocal before
        pass_time(engine)
        if step == 6:
            before = sum(pair.overlapped)
            assert before
            pair.start(model)

    with caplog.at_level(logging.INFO, logger="kimi_backend.serving"):
        assert texts(outcomes(engine, restart)) == expected
    assert sum(pair.overlapped) > before + 3
    assert caplog.text.count("target and draft wait for each other on the GPU") == 2


@pytest.mark.parametrize("fails_after", ["before its step", "behind its step"])
def test_a_draft_that_fails_costs_speculation_and_no_text(
    make_pair: Callable[..., Pair], lockstep: Lockstep, fails_after: str
) -> None:
    expected = texts(lockstep(SETTING))
    pair = make_pair()
    draft = pair.runner("eagle3_draft")
    launch, has_failed = draft.launch, False

    def fail(plan: DraftPlan) -> Any:
        nonlocal has_failed
        if sum(pair.overlapped) == 4 and not has_failed:
            has_failed = True
            if fails_after == "behind its step":
                launch(plan)
            raise RuntimeError("planted")
        return launch(plan)

    draft.launch = fail
    engine = pair.engine()
    assert texts(outcomes(engine, lambda _: pass_time(engine))) == expected
    assert sum(pair.overlapped) > 6, "the draft was met again"


def test_a_verify_that_fails_lets_its_draft_go(
    make_pair: Callable[..., Pair], lockstep: Lockstep, caplog: pytest.LogCaptureFixture
) -> None:
    expected = texts(lockstep(SETTING))
    pair = make_pair()
    target = pair.runner("kimi_target")
    launch, num_calls = target.launch, 0

    def fail(plan: TargetPlan) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 6:
            raise RuntimeError("planted")
        return launch(plan)

    target.launch = fail
    assert texts(outcomes(pair.engine())) == expected
    assert num_calls > 8
    assert sum(pair.overlapped) > 4
    assert LET_GO not in caplog.text


SLEEPER = """
import os, sys, time
from kimi_backend.runners.hand_over.semaphores import DRAFTED, QUEUED, TARGET_PID, OpenedSemaphores, OwnSemaphores
if sys.argv[1] == "draft":
    own = OwnSemaphores((5, 9))
    own.semaphores.proposed[:] = 7
    own.semaphores.set_value(QUEUED, 2)  # a step that it will not live to see
    own.semaphores.set_value(DRAFTED, 1)
    print(own.handle.decode(), flush=True)
else:
    opened = OpenedSemaphores.open(sys.argv[1].encode())
    opened.semaphores.set_value(TARGET_PID, os.getpid())
    print("open", flush=True)
time.sleep(60)
"""


@contextmanager
def sleeper(argument: str) -> Iterator["tuple[subprocess.Popen[str], str]"]:
    """Another process, and what it says."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPER, argument], stdout=-1, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def empty_table() -> TokenTable:
    limits = RunnerLimits(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=8)
    return TokenTable.allocate(limits, torch.device("cpu"), is_split=True)


class Watcher:
    """Stands for a runner; keeps what the table said at each launch."""

    depth = 2

    def __init__(self, half: torch.Tensor) -> None:
        self._half = half
        self.given: list[torch.Tensor] = []

    def describe(self) -> Any:
        raise NotImplementedError

    def launch(self, plan: Any) -> Any:
        self.given.append(self._half.clone())


ROWS = RowPlan(
    token_ids=np.ones(6, np.int32),
    query_lens=np.full(2, 3, np.int32),
    seq_lens=np.full(2, 9, np.int32),
    block_table=np.zeros((2, 1), np.int32),
)


def verify(step_id: int, draft_step: int) -> TargetPlan:
    """A verify of two sequences that reads what the draft's step has left."""
    plan = TargetPlan.given(
        step_id=step_id,
        rows=ROWS,
        num_sampled_rows=ROWS.query_lens,
        sampling=SamplingPlan.plain(2),
        num_logprobs=None,
        wants_aux=np.ones(2, np.bool_),
        draft_step=draft_step,
    )
    return replace(plan, num_given=np.ones(2, np.int32))


def plan_behind(step_id: int) -> DraftPlan:
    """The draft step behind it."""
    plan = DraftPlan.given(
        step_id=step_id,
        rows=ROWS,
        aux=AuxHandle(region=0),
        aux_rows=np.arange(6),
        num_proposals=np.full(2, 2, np.int32),
        sampling=SamplingPlan.plain(2),
        output_index=np.full(2, 8),
        in_table=True,
    )
    return replace(plan, num_drawn=ROWS.query_lens)


def open_pair() -> tuple[DraftSync, TargetSync]:
    draft, target = DraftSync(empty_table(), torch.device("cpu")), TargetSync(empty_table(), torch.device("cpu"))
    assert target.open(draft.handle) == draft.handle
    return draft, target


def promise(side: DraftSync, step_id: int) -> None:
    """Promise a step, as a target does as soon as it is given a verify."""
    side._semaphores.set_value(PROMISED, step_id)


def test_a_target_is_let_go_when_its_draft_dies(caplog: pytest.LogCaptureFixture) -> None:
    table = empty_table()
    side, target = TargetSync(table, torch.device("cpu")), Watcher(table.proposed)
    with sleeper("draft") as (process, handle):
        assert side.open(handle.encode()) == handle.encode()
        threading.Timer(0.1, process.kill).start()
        side.launch(verify(3, draft_step=2), target)
    assert f"{LET_GO}: dead" in caplog.text
    assert (target.given[0][:, 0] == 7).all(), "stamped with another step than is asked for"
    side.close()
    side.launch(verify(4, draft_step=3), target)
    assert (target.given[1][:, 0] == PLACEHOLDER_TOKEN_ID).all()
    assert side.open(handle.encode()) is None


def test_a_draft_is_let_go_when_its_target_dies(caplog: pytest.LogCaptureFixture) -> None:
    table = empty_table()
    side, draft = DraftSync(table, torch.device("cpu")), Watcher(table.drawn)
    table.drawn[:] = 5
    with sleeper(side.handle.decode()) as (process, _):
        promise(side, 5)
        threading.Timer(0.1, process.kill).start()
        side.launch(plan_behind(5), draft)
    assert f"{LET_GO}: dead" in caplog.text
    assert not draft.given[0].any()
    side.close()


def test_a_draft_step_never_waits_for_a_verify_that_the_target_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_sync, "PROMISE_S", 0.1)
    draft, target = open_pair()
    runner = Watcher(torch.zeros(1))
    with pytest.raises(ModelUnavailableError, match="draft step 5: the target was not given the verify before it"):
        draft.launch(plan_behind(5), runner)
    assert not runner.given
    target.launch(verify(6, draft_step=5), runner)
    assert len(runner.given) == 1, "and the next verify does not wait for it"
    target.close()
    draft.close()


@pytest.mark.parametrize("promised", [4, 6])
def test_a_step_id_that_the_target_was_not_given_is_not_waited_for(
    promised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait would be a GPU's stream's, for as long as a minute."""
    monkeypatch.setattr(step_sync, "PROMISE_S", 0.05)
    draft, target = open_pair()
    promise(draft, promised)
    with pytest.raises(ModelUnavailableError, match="was not given"):
        draft.launch(plan_behind(5), Watcher(torch.zeros(1)))
    assert draft._semaphores.value(WAITED) == 0
    target.close()
    draft.close()


@pytest.mark.parametrize("step_id", [5, 4])
def test_a_step_that_is_not_a_new_one_is_never_shown(step_id: int) -> None:
    draft, target = open_pair()
    draft._semaphores.set_value(PROMISED, 5)
    draft._semaphores.set_value(VERIFIED, 5)
    target.launch(verify(step_id, draft_step=0), Watcher(torch.zeros(1)))
    assert (draft._semaphores.value(PROMISED), draft._semaphores.value(VERIFIED)) == (5, 5)
    target.close()
    draft.close()


def test_nobody_waits_longer_than_it_must_for_one_that_lives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_sync, "LONGEST_WAIT_S", 0.2)
    draft, target = open_pair()
    runner = Watcher(torch.zeros(1))
    promise(draft, 5)
    draft.launch(plan_behind(5), runner)
    assert f"{LET_GO}: late" in caplog.text
    target.close()
    monkeypatch.setattr(step_sync, "LONGEST_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(step_sync, "PROMISE_S", PATIENCE_S)
    start = time.monotonic()
    with pytest.raises(ModelUnavailableError, match="was not given"):
        draft.launch(plan_behind(6), runner)
    assert time.monotonic() - start < PATIENCE_S, "it knows that the target has left"
    draft.close()


class Clock:
    """Takes the place of `time`; it stands still until it is told, and counts who looks at it."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.now = 0.0
        self.num_looks = 0

    def monotonic(self) -> float:
        self.num_looks += 1
        return self.now

    def pass_time(self, seconds: float) -> None:
        """Go on, once whoever waits has looked."""
        before = self.num_looks
        wait_for(lambda: self.num_looks > before + 3)
        self.now += seconds


def test_one_wait_after_another_is_no_long_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A draft of a large target waits nearly all the time."""
    clock = Clock()
    monkeypatch.setattr(step_sync, "time", clock)
    monkeypatch.setattr(step_sync, "LOOK_S", 0.002)
    draft, target = open_pair()
    for step_id in range(1, 5):
        promise(draft, step_id)
        step = threading.Thread(target=draft.launch, args=(plan_behind(step_id), Watcher(torch.zeros(1))))
        step.start()
        clock.pass_time(0.6 * step_sync.LONGEST_WAIT_S)
        clock.pass_time(0.0)
        draft._semaphores.set_value(VERIFIED, step_id)
        step.join()
    assert LET_GO not in caplog.text
    target.close()
    draft.close()


def test_semaphores_of_a_table_of_another_size_are_not_opened() -> None:
    draft = DraftSync(empty_table(), torch.device("cpu"))
    limits = RunnerLimits(max_num_batched_tokens=8, max_num_seqs=5, max_model_len=8)
    target = TargetSync(TokenTable.allocate(limits, torch.device("cpu")), torch.device("cpu"))
    assert target.open(draft.handle) is None
    assert draft._semaphores.value(TARGET_PID) == 0
    draft.close()
