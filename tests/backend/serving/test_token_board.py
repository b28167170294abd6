"""Draft tokens between the runners' processes: whenever they come, and whether or not, the text is the same."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.config.draft_config import DraftOverrides
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.serving import token_board
from kimi_backend.serving.aux_transfer import AuxTransfer, TokenTransfer
from kimi_backend.serving.bls_models import BlsDraft, BlsTarget
from kimi_backend.serving.runner_server import RunnerServer
from kimi_backend.serving.token_board import TokenReader, TokenWriter
from kimi_backend.types.plan import DraftPlan, DraftReply, RunnerDescription, TokenHandle
from kimi_backend.types.request import GenerateRequest, SamplingParams
from support.engine_runs import EngineHarness
from support.loopback_server import LoopbackServer
from support.markov_models import markov_draft, markov_draft_config, markov_target
from support.tiny_configs import target_config
from support.tiny_runners import LIMITS, draft_runner, target_runner

TARGET = target_config(num_hidden_layers=3)
DRAFT = markov_draft_config(TARGET, DraftOverrides(aux_layer_ids=(1, 2, 3)))
PROMPTS = [(3, 5, 7, 2, 9), (1,) * 30, (4, 8)]
SHAPE = (8, LIMITS.max_num_seqs)


class LeavingDraft:
    """What a draft on a GPU does: it answers with the array that its tokens will lie in."""

    left_shape = SHAPE

    def __init__(self) -> None:
        self._runner = draft_runner(DRAFT, markov_draft(DRAFT, markov_target(TARGET), 0.1)).runner
        self.num_left = 0

    def describe(self) -> RunnerDescription:
        return self._runner.describe()

    def propose(self, plan: DraftPlan) -> DraftReply:
        reply = self._runner.propose(replace(plan, leaves_tokens=False))
        if not plan.leaves_tokens:
            return reply
        self.num_left += 1
        left, num_seqs = torch.full(SHAPE, -1, dtype=torch.int32), len(reply.seq_status)
        left[0, :num_seqs] = torch.from_numpy(reply.seq_status)
        columns = np.flatnonzero(plan.num_proposals)
        left[1 : 1 + reply.draft_token_ids.shape[1], columns] = torch.from_numpy(reply.draft_token_ids.T).int()
        tokens = TokenHandle(num_seqs=num_seqs, tensor=left)
        nothing = {"draft_token_ids": np.empty((0, 0), np.int64), "seq_status": np.zeros_like(reply.seq_status)}
        return replace(reply, tokens=tokens, **nothing)


class Pair:
    """Both runners behind a loopback."""

    def __init__(self) -> None:
        self.loopback = LoopbackServer()
        self.drafts: list[LeavingDraft] = []
        self.start("kimi_target")
        self.start("eagle3_draft")

    def start(self, model: str) -> None:
        """Load one runner, or load it again."""
        if model == "kimi_target":
            runner: Any = target_runner(TARGET, markov_target(TARGET), aux_layer_ids=(1, 2, 3)).runner
        else:
            runner = LeavingDraft()
            self.drafts.append(runner)
        if model in self.loopback.servers:
            self.loopback.servers[model].close()
        self.loopback.servers[model] = RunnerServer(runner, self.loopback.pb_utils, shows_tokens=True)

    def engine(self, *, launch_ahead: bool = True) -> EngineHarness:
        aux, tokens = AuxTransfer(), TokenTransfer()
        harness = EngineHarness(
            BlsTarget(self.loopback.pb_utils, "kimi_target", aux, tokens),
            BlsDraft(self.loopback.pb_utils, "eagle3_draft", aux, tokens),
            SchedulerSettings(launch_ahead=launch_ahead),
        )
        for index, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(seed=index, max_tokens=60, ignore_eos=True)
            harness.add(
                GenerateRequest(
                    request_id=str(index), prompt_token_ids=prompt, sampling=sampling, num_speculative_tokens=3
                )
            )
        return harness

    @property
    def num_left(self) -> int:
        return sum(draft.num_left for draft in self.drafts)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for server in pair.loopback.servers.values():
        server.close()


@pytest.fixture
def expected(pair: Pair) -> list[tuple[Any, ...]]:
    """In lockstep."""
    found = outcomes(pair.engine(launch_ahead=False))
    assert pair.num_left == 0
    return found


def outcomes(harness: EngineHarness, each_step: Callable[[int], None] | None = None) -> list[tuple[Any, ...]]:
    """Tokens and rounds."""
    harness.run(each_step=each_step)
    return [(outcome.token_ids, outcome.rounds) for outcome in harness.outcomes]


@pytest.mark.parametrize("late_s", [0.0, 0.005], ids=["at once", "late"])
def test_tokens_by_the_board_are_those_of_the_reply(
    pair: Pair, expected: list[tuple[Any, ...]], late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenWriter, "_wait", lambda self, event: time.sleep(late_s))
    assert outcomes(pair.engine()) == expected
    assert pair.num_left > 10


@pytest.mark.parametrize("model", ["kimi_target", "eagle3_draft"])
def test_a_restarted_runner_uses_the_board_again(pair: Pair, expected: list[tuple[Any, ...]], model: str) -> None:
    before = 0

    def restart(step: int) -> None:
        nonlocal before
        if step == 6:
            before = pair.num_left
            assert before > 0
            pair.start(model)

    found = outcomes(pair.engine(), restart)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert pair.num_left > before + 3


def test_a_board_that_cannot_be_opened_costs_nothing_but_time(
    pair: Pair, expected: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TokenWriter, "handle", property(lambda self: b'{"process_id": 1}'))
    pair.start("eagle3_draft")
    assert outcomes(pair.engine()) == expected
    assert pair.num_left == 0
    assert "cannot be opened" in caplog.text


def test_a_step_that_failed_after_its_answer_is_no_token(
    pair: Pair, expected: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: TokenWriter, event: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(TokenWriter, "_wait", fail)
    found = outcomes(pair.engine())
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert not any(rounds for _, rounds in found)


WRITER = """
import sys, time, torch
from kimi_backend.serving.token_board import TokenWriter
writer = TokenWriter((3, 4))
left = torch.arange(12, dtype=torch.int32).reshape(3, 4)
writer.post(left, 2)
print(writer.handle.decode(), flush=True)
sys.stdin.readline()
writer.post(left + 100, 4)
time.sleep(60)
"""


@pytest.fixture
def writer() -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([sys.executable, "-c", WRITER], stdin=-1, stdout=-1, text=True)
    yield process
    process.kill()
    process.communicate()


def test_another_process_reads_it_until_its_writer_dies(
    writer: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    assert writer.stdout is not None
    assert writer.stdin is not None
    reader = TokenReader()
    handle = writer.stdout.readline().strip().encode()
    assert reader.open(handle) == handle
    first = reader.take(TokenHandle(num_seqs=2, region=1), 3).tensor
    assert first is not None
    assert first.tolist() == [[0, 1], [4, 5], [8, 9]]
    writer.stdin.write("\n")
    writer.stdin.flush()
    assert reader.take(TokenHandle(num_seqs=4, region=2), 3).tensor.tolist()[0] == [100, 101, 102, 103]  # type: ignore[union-attr]
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    start = time.monotonic()
    assert_failed(reader.take(TokenHandle(num_seqs=4, region=3), 3), [3, 4])
    assert time.monotonic() - start < 2
    assert reader.open(None) is None
    assert_failed(reader.take(TokenHandle(num_seqs=2, region=2), 2), [2, 2])


def test_a_target_waits_for_a_living_draft_no_longer_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_board, "LONGEST_WAIT_S", 0.2)
    writer, reader = TokenWriter((3, 4)), TokenReader()
    assert reader.open(writer.handle) == writer.handle
    assert_failed(reader.take(TokenHandle(num_seqs=3, region=1), 2), [2, 3])
    writer.close()


def assert_failed(handle: TokenHandle, shape: list[int]) -> None:
    assert handle.tensor is not None
    assert list(handle.tensor.shape) == shape
    assert (handle.tensor[0] != 0).all()
    assert (handle.tensor[1:] == -1).all()
