"""Two ranks in two processes on a CPU, over gloo: one rank's texts, and what happens when one of them goes."""

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest

from kimi_backend.checkpoint.presets import DraftKind
from kimi_backend.errors import CheckpointError, ConfigError
from kimi_backend.processes import is_alive
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.load.loading import load_draft_runner, load_pair, load_target_runner
from kimi_backend.runners.ranks import worker_processes
from kimi_backend.runners.ranks.messages import Step, WorkerError, unpacked
from kimi_backend.runners.ranks.worker_processes import WorkerProcesses
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.scoring import ScoringPlan
from support import tiny_ranks
from support.engine_runs import generate
from support.forked_processes import ForkedWorker, start_forked
from support.random_requests import random_requests
from support.tiny_ranks import make_tiny, run_rank_0, tiny_settings
from support.waiting import PATIENCE_S, wait_for

LIMITS = SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=256)
Pair = tuple[TargetRunner, DraftRunner]
CLOSES_NOTHING = """
import sys
from pathlib import Path
from kimi_backend.runners.load.loading import load_target_runner
from support.tiny_ranks import tiny_settings

target = load_target_runner(tiny_settings(Path(sys.argv[1]), draft="", tensor_parallel_size=2))
print(target.workers.process_ids[0])
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("ranks") / "tiny", DraftKind.MLA)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks begin with torch imported, where how they start and end is not asked."""
    monkeypatch.setattr(worker_processes.subprocess, "Popen", ForkedWorker)


@pytest.fixture
def two(tiny: Path, forked: None) -> Iterator[Pair]:
    target, draft = load_pair(tiny_settings(tiny, tensor_parallel_size=2))
    assert draft is not None
    yield target, draft
    target.close()
    draft.close()


def test_two_ranks_write_what_one_writes(tiny: Path, two: Pair) -> None:
    """Every sampling feature, k from 0 to 7, log-probabilities."""
    one = load_pair(tiny_settings(tiny))
    described = two[0].describe()
    requests = random_requests(random.Random(5), 14, described.vocab_size)
    expected, found = generate(*one, requests, LIMITS), generate(*two, requests, LIMITS)
    assert [outcome.token_ids for outcome in found] == [outcome.token_ids for outcome in expected]
    assert [outcome.rounds for outcome in found] == [outcome.rounds for outcome in expected]
    assert described.num_blocks == one[0].describe().num_blocks
    plan = replace(tiny_ranks.one_row_plan(1), num_logprobs=3)
    ours, theirs = one[0].launch(plan).wait(), two[0].launch(plan).wait()
    assert np.array_equal(ours.top_logprob_ids, theirs.top_logprob_ids)
    assert np.allclose(ours.top_logprobs, theirs.top_logprobs, atol=1e-5)
    scoring = ScoringPlan(rows=np.array([0], np.int32), token_ids=np.array([5], np.int32), num_top=3)
    ours, theirs = (pair[0].launch(replace(plan, step_id=2, scoring=scoring)).wait() for pair in (one, two))
    assert np.array_equal(ours.scores.top_ids, theirs.scores.top_ids)
    assert np.allclose(ours.scores.logprobs, theirs.scores.logprobs, atol=1e-5)


@pytest.mark.usefixtures("forked")
def test_closing_ends_the_ranks_and_another_pair_may_come(tiny: Path) -> None:
    for _ in range(2):
        target = load_target_runner(tiny_settings(tiny, draft="", tensor_parallel_size=2))
        workers = target.workers
        assert isinstance(workers, WorkerProcesses)
        (rank,) = workers.process_ids
        target.launch(tiny_ranks.one_row_plan(1)).wait()
        target.close()
        target.close()
        assert not is_alive(rank)


@pytest.mark.parametrize(
    ("size", "message"),
    [(3, "3 given, which does not divide num_attention_heads"), (7, r"7 given.*vocab_size 2048.*; 1, 2, 4 would")],
)
def test_sizes_that_do_not_divide_are_named(tiny: Path, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_pair(tiny_settings(tiny, tensor_parallel_size=size))
    with pytest.raises(ConfigError, match="the draft's draft_vocab_size"):
        load_draft_runner(tiny_settings(tiny, tensor_parallel_size=size))


def test_a_rank_that_cannot_load_ends_this_process(tiny: Path) -> None:
    problems: list[str] = []
    workers = WorkerProcesses(tiny_settings(tiny, tensor_parallel_size=2), "nonsense", end=problems.append)
    wait_for(lambda: bool(problems))
    assert problems == ["rank 1 of the nonsense has ended with code 1"]
    workers.close()


def test_what_rank_0_cannot_load_is_raised_and_ends_the_others(tiny: Path) -> None:
    problems: list[str] = []
    workers = WorkerProcesses(tiny_settings(tiny, tensor_parallel_size=2), "pair", end=problems.append)
    (rank,) = workers.process_ids
    with pytest.raises(CheckpointError, match="broken"), workers.loading():
        raise CheckpointError("model.safetensors", ["broken"])
    assert not is_alive(rank)
    assert not problems


class Rank0:
    """A process of `run_rank_0`, and the process id of the rank 1 that it has started."""

    def __init__(self, tiny: Path, action: str, errors: Path) -> None:
        told, tell = Pipe(duplex=False)
        self._errors = errors
        self.process = start_forked(run_rank_0, str(tiny), action, tell, str(errors))
        tell.close()
        self.rank_1 = told.recv()

    def end(self) -> tuple[int | None, str]:
        """Its exit code and what it said; it is waited for."""
        self.process.join(PATIENCE_S)
        return self.process.exitcode, self._errors.read_text()


def test_a_killed_rank_ends_rank_0(tiny: Path, tmp_path: Path) -> None:
    """Rank 0 is in a collective then and notices nothing itself; what notices does not know what rank 0 does."""
    rank_0 = Rank0(tiny, "run", tmp_path / "errors")
    time.sleep(0.2)
    os.kill(rank_0.rank_1, signal.SIGKILL)
    code, errors = rank_0.end()
    assert code == 1
    assert "this process ends" in errors


@pytest.mark.parametrize("action", ["wait", "run"])
def test_a_killed_rank_0_ends_the_others(tiny: Path, action: str, tmp_path: Path) -> None:
    rank_0 = Rank0(tiny, action, tmp_path / "errors")
    time.sleep(0.2)
    rank_0.process.kill()
    rank_0.end()
    wait_for(lambda: not is_alive(rank_0.rank_1))


def test_a_rank_that_raises_ends_rank_0(tiny: Path, tmp_path: Path) -> None:
    code, errors = Rank0(tiny, "mislead", tmp_path / "errors").end()
    assert code == 1
    assert "this rank has no draft" in errors
    assert "rank 1 of the target has ended with code 1; this process ends" in errors


def test_a_process_that_closes_nothing_ends_all_the_same(tiny: Path) -> None:
    """A process of its own, from its beginning: what is registered at the exit of one that was forked is not called."""
    done = subprocess.run(
        [sys.executable, "-c", CLOSES_NOTHING, str(tiny)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    wait_for(lambda: not is_alive(int(done.stdout)))


def test_a_rank_that_does_not_start_ends_those_before_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems, started = list[str](), list[subprocess.Popen[bytes]]()
    popen = subprocess.Popen

    def only_one(*args: object, **options: object) -> object:
        if started:
            raise OSError("no more processes")
        started.append(popen(*args, **options))  # type: ignore[call-overload]
        return started[0]

    monkeypatch.setattr(worker_processes.subprocess, "Popen", only_one)
    with pytest.raises(WorkerError, match="rank 2 of the pair: its process did not start: no more processes"):
        WorkerProcesses(tiny_settings(tiny, tensor_parallel_size=4), "pair", end=problems.append)
    assert not is_alive(started[0].pid)
    assert not problems


@pytest.mark.usefixtures("forked")
def test_what_is_waited_for_goes_with_its_semaphores(tiny: Path) -> None:
    """A step that is refused leaves a value to wait for behind, which the next semaphores may never reach."""
    target = load_target_runner(tiny_settings(tiny, draft="", tensor_parallel_size=2))
    workers, messages = target.workers, list[bytes]()
    assert isinstance(workers, WorkerProcesses)
    try:
        workers.tell = messages.append  # type: ignore[method-assign]
        workers.wait_before_next(1, 5000)
        workers.ask("open semaphores", [b""])
        workers.wait_before_next(1, 2)
        for step_id in (1, 2):
            with workers.run(tiny_ranks.one_row_plan(step_id)):
                pass
        steps = [unpacked(pickle.loads(message)) for message in messages]
        assert [step.waits for step in steps if isinstance(step, Step)] == [((1, 2),), ()]
    finally:
        target.close()


@pytest.mark.usefixtures("forked")
def test_every_answer_is_read_though_one_is_a_problem(tiny: Path) -> None:
    draft = load_draft_runner(tiny_settings(tiny, tensor_parallel_size=4))
    try:
        with pytest.raises(WorkerError, match=r"rank 1 of the draft: .*; rank 2 of .*; rank 3 of "):
            draft.workers.ask("open aux", [b"x"] * 3)
        assert draft.workers.ask("open aux", [b""] * 3) == [b""] * 3
        with pytest.raises(WorkerError, match="rank 2 of the draft"):
            draft.workers.ask("open aux", [b"", b"x", b""])
        assert draft.workers.ask("open aux", [b""] * 3) == [b""] * 3
    finally:
        draft.close()
    with pytest.raises(WorkerError, match="has ended"):
        draft.workers.ask("open aux", [b""] * 3)
