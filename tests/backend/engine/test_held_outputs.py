"""Outputs that wait until the next step is on its way: in order, none lost, ends at once."""

from kimi_backend.engine.commit import StepOutput
from kimi_backend.engine.held_outputs import HeldOutputs
from kimi_backend.scheduler.sequence import Finish
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.request import EndCause, FinishReason, GenerateRequest, SamplingParams
from support.engine_runs import EngineHarness
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

SCRIPT = LogitScript(48)
CANCELLED = Finish(FinishReason.CANCELLED, error="", cause=EndCause.CLIENT)


def harness() -> EngineHarness:
    target, draft = ScriptedTarget(describe("target", SCRIPT), SCRIPT), ScriptedDraft(describe("draft", SCRIPT), SCRIPT)
    return EngineHarness(target, draft, SchedulerSettings())


def request(name: str, **sampling: object) -> GenerateRequest:
    params = SamplingParams(seed=1, ignore_eos=True, max_tokens=40, **sampling)  # type: ignore[arg-type]
    return GenerateRequest(request_id=name, prompt_token_ids=(1, 2, 3), sampling=params, num_speculative_tokens=3)


def test_an_overlapped_rounds_outputs_come_when_the_next_step_is_on_its_way() -> None:
    one = harness()
    outcome = one.add(request("a"))
    num_rounds = [0]
    for _ in range(4):
        one.step()
        num_rounds.append(len(outcome.steps))
    assert one.core._draft.num_overlapped == 3  # type: ignore[union-attr]
    # The prompt's round is not overlapped, and its output is not held.
    assert num_rounds == [0, 1, 1, 2, 3]
    held = outcome.sequence.num_tokens - 3 - len(outcome.token_ids)
    assert held > 0
    assert one.core.end(outcome.sequence, CANCELLED)
    assert outcome.sequence.num_tokens == 3 + len(outcome.token_ids), "what was held is emitted before the end"


def test_what_is_held_comes_while_the_target_is_away() -> None:
    one = harness()
    outcome = one.add(request("a"))
    for _ in range(4):
        one.step()
    one.core._target.unavailable = True  # type: ignore[attr-defined]
    one.step()  # loses it
    assert not one.core.runners.target.is_up
    assert outcome.sequence.num_tokens > 3 + len(outcome.token_ids)
    assert not one.step()
    assert outcome.sequence.num_tokens == 3 + len(outcome.token_ids)


def test_an_end_is_told_at_once() -> None:
    one = harness()
    outcome = one.add(request("a"))
    while not outcome.sequence.finish:
        one.step()
    assert len(outcome.finishes) == 1
    assert len(outcome.token_ids) == 40


def test_who_looks_for_a_stop_string_is_told_at_once() -> None:
    one = harness()
    outcome = one.add(request("a", stop=("never",)))
    for count in range(1, 5):
        one.step()
        assert len(outcome.steps) == count


def test_the_order_is_kept() -> None:
    emitted: list[list[StepOutput]] = []
    outputs = HeldOutputs(emitted.append)
    sequence = harness().add(request("a")).sequence
    first, second, third, last = ([StepOutput(sequence, time_s)] for time_s in range(4))
    outputs.hold(first)
    assert not emitted
    outputs.hold(second)
    assert emitted == [first]
    outputs.put(third)
    outputs.flush()
    assert emitted == [first, second, third]
    last[0].finish = CANCELLED
    outputs.hold(last)
    assert emitted == [first, second, third, last]
