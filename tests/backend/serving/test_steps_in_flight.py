"""Steps without speculation through the runner's server, one call a round: the same tokens as one step a call."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from kimi_backend.errors import ModelUnavailableError
from kimi_backend.runners.ranks.workers import NO_WORKERS
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.serving import tensor_names as names
from kimi_backend.serving.aux_transfer import AuxTransfer
from kimi_backend.serving.bls_models import BlsTarget
from kimi_backend.serving.target_server import TargetServer
from kimi_backend.types import codec
from kimi_backend.types.plan import AuxHandle, TargetPlan, TargetReply
from kimi_backend.types.request import GenerateRequest, SamplingParams
from support.engine_runs import EngineHarness
from support.loopback_server import SECRET, LoopbackServer
from support.plain_decoding import decode_plainly
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedTarget, describe

VOCAB = 48
SCRIPT = LogitScript(VOCAB)
EOS = frozenset({5})
REQUESTS = [
    GenerateRequest(
        request_id=str(index),
        prompt_token_ids=tuple(range(6 + index, 12 + 2 * index)),
        sampling=SamplingParams(max_tokens=20 + 5 * index, temperature=float(index % 2), seed=index),
        num_speculative_tokens=0,
    )
    for index in range(6)
]


@cache
def expected() -> list[list[int]]:
    return decode_plainly(SCRIPT, REQUESTS, eos_token_ids=EOS, max_model_len=128)


class TargetAlone(ScriptedTarget):
    """A runner of which nobody reads aux hidden states, which could not travel."""

    aux_buffer = table = None
    device, workers = torch.device("cpu"), NO_WORKERS

    def _verify(self, plan: TargetPlan) -> TargetReply:
        return replace(super()._verify(plan), aux=AuxHandle())


@dataclass
class Served:
    """An engine over a target behind a loopback."""

    target: ScriptedTarget
    server: LoopbackServer
    harness: EngineHarness

    @property
    def calls(self) -> list[list[str]]:
        """Names of each step's inputs."""
        return [inputs for _, inputs, _ in self.server.calls if names.DESCRIBE not in inputs]

    def texts(self) -> list[list[int]]:
        return [outcome.token_ids for outcome in self.harness.outcomes]


def served(*, depth: int = 2, async_scheduling: bool = True, **settings: int) -> Served:
    target = TargetAlone(describe("target", SCRIPT, depth=depth), SCRIPT)
    server = LoopbackServer()
    server.servers["kimi_target"] = TargetServer(target, server.pb_utils, secret=SECRET)
    bls = BlsTarget(server.pb_utils, "kimi_target", AuxTransfer(), secret=SECRET)
    harness = EngineHarness(bls, None, SchedulerSettings(async_scheduling=async_scheduling, **settings), EOS)  # type: ignore[arg-type]
    for request in REQUESTS:
        harness.add(request)
    return Served(target, server, harness)


def test_one_call_a_round_brings_the_next_step_and_takes_the_last_reply() -> None:
    one = served()
    one.harness.run()
    assert one.texts() == expected()
    assert one.calls[0] == [names.PLAN, names.STEP], "the prompts"
    assert one.calls[1] == [names.PLAN, names.NEXT_PLAN, names.STEP]
    assert one.calls.count([names.PLAN, names.STEP]) > 30
    assert one.calls[-1] == [names.STEP]
    assert one.target.num_behind > 30
    assert len(one.calls) == one.target.num_steps


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 7, "max_num_seqs": 4}])
def test_newcomers_and_ends(settings: dict[str, int]) -> None:
    one = served(**settings)
    one.harness.run()
    assert one.texts() == expected()
    assert one.target.num_behind > 5
    assert one.harness.core.kv.target_pool.num_held == 0


def test_a_target_that_cannot_queue_gets_no_step_ahead() -> None:
    for one in (served(depth=0), served(async_scheduling=False)):
        one.harness.run()
        assert one.texts() == expected()
        assert set(map(tuple, one.calls)) == {(names.PLAN, names.STEP)}


@pytest.mark.parametrize("at_step", [4, 5, 6])
def test_another_target_knows_nothing_of_the_step_in_flight(at_step: int) -> None:
    """It says so; the engine takes it for lost and begins anew with it."""
    one = served()

    def restart(step: int) -> None:
        if step == at_step:
            one.target.restart()
            one.server.servers["kimi_target"] = TargetServer(one.target, one.server.pb_utils, secret=SECRET)

    one.harness.run(each_step=restart)
    assert one.texts() == expected()
    assert one.harness.core.scheduler.num_preemptions > 0


def test_requests_that_ask_for_nothing() -> None:
    one = served()
    bls = one.harness.core._target
    plans: list[TargetPlan] = []
    verify = one.target._verify
    one.target._verify = lambda plan: plans.append(plan) or verify(plan)  # type: ignore[method-assign, func-returns-value]
    one.harness.step()
    plan = one.server.pb_utils.Tensor(names.PLAN, codec.encode(plans[0]))
    step = one.server.pb_utils.Tensor(names.STEP, np.array([77], np.int64))
    for inputs, message in (
        ([plan], "one of the inputs STEP, SEMAPHORES, DESCRIBE is needed, none was given"),
        ([step], "STEP: 77 given, in flight: none"),
    ):
        with pytest.raises(ModelUnavailableError, match=message):
            bls._call(inputs, [names.REPLY])  # type: ignore[attr-defined]


def test_a_step_that_nobody_asks_for_is_let_go() -> None:
    """Its asker was lost: another one's steps are not held up by it."""
    one = served()
    server = one.server.servers["kimi_target"]
    lost = {-2: None, -1: None}
    server._in_flight |= lost  # type: ignore[attr-defined]
    one.harness.run()
    assert one.texts() == expected()
    assert not set(lost) & set(server._in_flight)  # type: ignore[attr-defined]
