"""Steps without speculation through the runner's server, one call a round: the same tokens as one step a call."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from kimi_backend.errors import ModelUnavailableError
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.serving import tensor_names as names
from kimi_backend.serving.aux_transfer import AuxTransfer
from kimi_backend.serving.bls_steps_ahead import QueueingBlsTarget
from kimi_backend.serving.runner_server import RunnerServer
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
EXPECTED = decode_plainly(SCRIPT, REQUESTS, eos_token_ids=EOS, max_model_len=128)


class TargetAlone(ScriptedTarget):
    """Nobody reads its aux hidden states, which could not travel."""

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


def served(*, queues_steps: bool = True, launch_ahead: bool = True, **settings: int) -> Served:
    target = TargetAlone(describe("target", SCRIPT, queues_steps=queues_steps), SCRIPT)
    server = LoopbackServer()
    server.servers["kimi_target"] = RunnerServer(target, server.pb_utils, secret=SECRET)
    bls = QueueingBlsTarget(server.pb_utils, "kimi_target", AuxTransfer(), secret=SECRET)
    harness = EngineHarness(bls, None, SchedulerSettings(launch_ahead=launch_ahead, **settings), EOS)  # type: ignore[arg-type]
    for request in REQUESTS:
        harness.add(request)
    return Served(target, server, harness)


def test_one_call_a_round_brings_the_next_step_and_takes_the_last_reply() -> None:
    one = served()
    one.harness.run()
    assert one.texts() == EXPECTED
    assert one.calls[0] == [names.PLAN], "the prompts"
    assert one.calls[1] == [names.PLAN, names.NEXT_PLAN]
    assert one.calls.count([names.STEP, names.NEXT_PLAN]) > 30
    assert one.calls[-1] == [names.STEP]
    assert one.target.num_behind > 30
    assert len(one.calls) == one.target.num_steps


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 7, "max_num_seqs": 4}])
def test_newcomers_and_ends(settings: dict[str, int]) -> None:
    one = served(**settings)
    one.harness.run()
    assert one.texts() == EXPECTED
    assert one.target.num_behind > 5
    assert one.harness.core.kv.target_pool.num_held == 0


def test_a_target_that_cannot_queue_gets_no_step_ahead() -> None:
    for one in (served(queues_steps=False), served(launch_ahead=False)):
        one.harness.run()
        assert one.texts() == EXPECTED
        assert set(map(tuple, one.calls)) == {(names.PLAN,)}


def test_a_step_that_was_not_launched_goes_again_with_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target declines every third one: nothing was lost, as the tokens are here by then."""
    one = served()
    launch, num_asked = one.target.launch, 0

    def declining(plan: TargetPlan) -> object:
        nonlocal num_asked
        num_asked += 1
        return None if num_asked % 3 == 0 else launch(plan)

    monkeypatch.setattr(one.target, "launch", declining)
    one.harness.run()
    assert one.texts() == EXPECTED, "other tokens"
    assert one.calls.count([names.STEP, names.NEXT_PLAN]) > 3
    assert one.calls.count([names.PLAN, names.NEXT_PLAN]) > 5


def test_a_wrong_token_shows_where_a_step_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: it is sent with the placeholder of its plan."""
    monkeypatch.setattr(np, "maximum", lambda values, least: np.zeros_like(values))
    with pytest.raises(AssertionError, match="other tokens"):
        test_a_step_that_was_not_launched_goes_again_with_its_tokens(monkeypatch)


@pytest.mark.parametrize("at_step", [4, 5, 6])
def test_another_target_knows_nothing_of_the_step_in_flight(at_step: int) -> None:
    """It says so; the engine takes it for lost and begins anew with it."""
    one = served()

    def restart(step: int) -> None:
        if step == at_step:
            one.target.restart()
            one.server.servers["kimi_target"] = RunnerServer(one.target, one.server.pb_utils, secret=SECRET)

    one.harness.run(each_step=restart)
    assert one.texts() == EXPECTED
    assert one.harness.core.scheduler.num_preemptions > 0


def test_requests_that_ask_for_nothing_or_twice() -> None:
    one = served()
    bls = one.harness.core._target
    plans: list[TargetPlan] = []
    verify = one.target._verify
    one.target._verify = lambda plan: plans.append(plan) or verify(plan)  # type: ignore[method-assign, func-returns-value]
    one.harness.step()
    plan = one.server.pb_utils.Tensor(names.PLAN, codec.encode(plans[0]))
    step = one.server.pb_utils.Tensor(names.STEP, np.array([77], np.int64))
    behind = one.server.pb_utils.Tensor(names.NEXT_PLAN, codec.encode(replace(plans[0], step_id=2)))
    for inputs, message in (
        ([behind], "one of the inputs PLAN and STEP is needed beside NEXT_PLAN, none given"),
        ([plan, step], "one of the inputs PLAN and STEP is needed beside NEXT_PLAN, both given"),
        ([step], "STEP: 77 given, in flight: none"),
    ):
        with pytest.raises(ModelUnavailableError, match=message):
            bls._call(inputs, [names.REPLY])  # type: ignore[attr-defined]
