"""The calls of each model, when and for whom, where each waits for the other (test_overlap.py: where not)."""

from dataclasses import replace

from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.plan import DraftPlan, TargetPlan
from kimi_backend.types.request import GenerateRequest, SamplingParams
from support.engine_runs import EngineHarness
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedPending, ScriptedTarget, describe

SCRIPT = LogitScript(32)


class Recorder:
    """A pair that writes down its calls."""

    def __init__(self, max_num_batched_tokens: int = 64) -> None:
        self.calls: list[tuple[str, TargetPlan | DraftPlan]] = []
        target = ScriptedTarget(describe("target", SCRIPT), SCRIPT)
        draft = ScriptedDraft(describe("draft", SCRIPT), SCRIPT, agreement=1.0)
        verify, propose = target.launch, draft.launch

        def recorded_verify(plan: TargetPlan) -> ScriptedPending:
            self.calls.append(("target", plan))
            return verify(plan)

        def recorded_propose(plan: DraftPlan) -> ScriptedPending:
            self.calls.append(("draft", plan))
            return propose(plan)

        target.launch = recorded_verify  # type: ignore[method-assign]
        draft.launch = recorded_propose  # type: ignore[method-assign]
        settings = SchedulerSettings(
            max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens, async_scheduling=False
        )
        self.harness = EngineHarness(target, draft, settings)

    def run(self, *requests: GenerateRequest) -> list[str]:
        for request in requests:
            self.harness.add(request)
        self.harness.run()
        return [name for name, _ in self.calls]


def request(k: int, prompt: tuple[int, ...] = (1, 2, 3), **sampling: object) -> GenerateRequest:
    params: dict[str, object] = {"seed": 1, "max_tokens": 9}
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**(params | sampling)),  # type: ignore[arg-type]
        num_speculative_tokens=k,
    )


def test_a_request_without_speculation_never_calls_the_draft() -> None:
    assert Recorder().run(request(0), request(0, (4, 5))) == ["target"] * 9


def test_one_call_to_each_model_a_step_and_none_to_the_draft_after_the_last_token() -> None:
    recorder = Recorder()
    names = recorder.run(request(3))
    assert names == ["target", "draft"] * (len(names) // 2) + ["target"]


def test_the_draft_sees_only_those_who_speculate() -> None:
    recorder = Recorder()
    recorder.run(request(0), request(2, (4, 5)), request(0, (6,)))
    sizes = {
        name: max(len(plan.rows.query_lens) for n, plan in recorder.calls if n == name) for name, _ in recorder.calls
    }
    assert sizes == {"target": 3, "draft": 1}
    assert next(plan.wants_aux.tolist() for name, plan in recorder.calls if name == "target") == [False, True, False]


def test_each_prefill_chunk_goes_through_the_draft() -> None:
    recorder = Recorder(max_num_batched_tokens=8)
    recorder.run(request(2, tuple(range(20))))
    drafts = [plan for name, plan in recorder.calls if name == "draft"]
    assert [plan.rows.query_lens.tolist() for plan in drafts[:3]] == [[8], [8], [4]]
    assert [plan.num_proposals.tolist() for plan in drafts[:3]] == [[0], [0], [2]]


def test_the_last_tokens_are_not_drafted_beyond_the_limit() -> None:
    recorder = Recorder()
    recorder.run(request(7, max_tokens=5))
    verifies = [plan for name, plan in recorder.calls if name == "target"]
    assert [plan.num_sampled_rows.tolist() for plan in verifies] == [[1], [4]], "4 tokens are left: 3 drafts and one"


def test_a_server_default_of_zero_turns_speculation_off() -> None:
    recorder = Recorder()
    recorder.harness.core.geometry = replace(
        recorder.harness.core.geometry, settings=SchedulerSettings(num_speculative_tokens=0)
    )
    assert set(recorder.run(replace(request(0), num_speculative_tokens=None))) == {"target"}
