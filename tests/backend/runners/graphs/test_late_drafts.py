"""A draft that begins in the middle of a sequence, through captured steps: the same proposals as through plain ones.

Its slots count from where it began, its noise from the sequence's first token.
"""

import numpy as np
import pytest
import torch

from kimi_backend.runners.step_runner import Launched
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.plan import DraftPlan, DraftReply
from kimi_backend.types.request import GenerateRequest, SamplingParams
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.synthetic_sets import with_synthetic_acceptance
from support.captured_runners import Setting, runner_pair
from support.engine_runs import EngineHarness
from support.plain_recorder import PlainRecorder
from support.random_policy import RandomPolicy

ACCEPTING = Setting(kernels=with_synthetic_acceptance(KernelSet.plain(), 2.5, torch.device("cpu")))
"""Draft tokens become the text, so one wrong number shows."""
REQUESTS = [
    GenerateRequest(
        request_id=str(index),
        prompt_token_ids=tuple(range(8, 14 + 5 * index)),
        sampling=SamplingParams(max_tokens=40, temperature=float(index % 2), seed=index, ignore_eos=True),
        num_speculative_tokens=(3, 2, 5)[index % 3],
    )
    for index in range(6)
]


def run(
    kind: str, setting: Setting, *, is_captured: bool, async_scheduling: bool
) -> tuple[EngineHarness, list[list[list[int]]]]:
    """Run to the end under a policy that acts at random; what each draft step proposed, where its reply says so."""
    target, draft = runner_pair(setting, kind, PlainRecorder() if is_captured else None)
    proposals: list[list[list[int]]] = []
    launch = draft.launch

    def kept(plan: DraftPlan) -> Launched[DraftReply]:
        reply = launch(plan).wait()
        if reply.draft_token_ids is not None:
            proposals.append(reply.draft_token_ids.tolist())
        return Launched(lambda: reply)

    draft.launch = kept  # type: ignore[method-assign]
    settings = SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=64, async_scheduling=async_scheduling)
    harness = EngineHarness(target, draft, settings)
    policy = harness.core.scheduler.policy = RandomPolicy(5)
    for request in REQUESTS:
        harness.add(request)
    harness.run()
    assert policy.num_begins > 5
    return harness, proposals


@pytest.mark.parametrize("kind", ["mla31", "mha"])
def test_captured_steps_propose_what_plain_ones_do(kind: str) -> None:
    setting = Setting(kernels=KernelSet.plain())
    _, plain = run(kind, setting, is_captured=False, async_scheduling=False)
    _, captured = run(kind, setting, is_captured=True, async_scheduling=False)
    assert sum(len(step) for step in plain) > 40
    assert captured == plain


@pytest.mark.parametrize("kind", ["mla31", "mha"])
def test_an_overlapped_draft_proposes_what_one_that_waits_does(kind: str) -> None:
    lockstep, _ = run(kind, ACCEPTING, is_captured=True, async_scheduling=False)
    early, _ = run(kind, ACCEPTING, is_captured=True, async_scheduling=True)
    for waited, launched in zip(lockstep.outcomes, early.outcomes, strict=True):
        assert launched.token_ids == waited.token_ids
        assert launched.rounds == waited.rounds
    assert sum(accepted for outcome in early.outcomes for _, accepted in outcome.rounds) > 30


def test_a_late_draft_proposes_what_one_that_never_saw_the_beginning_would() -> None:
    """Its plan says where its slots begin and which token it draws."""
    target, draft = runner_pair(Setting(kernels=KernelSet.plain()), "mla31", None)
    plans: list[DraftPlan] = []
    launch = draft.launch

    def kept(plan: DraftPlan) -> Launched[DraftReply]:
        plans.append(plan)
        return launch(plan)

    draft.launch = kept  # type: ignore[method-assign]
    harness = EngineHarness(target, draft, SchedulerSettings(async_scheduling=False))
    outcome = harness.add(REQUESTS[0])
    harness.step()
    outcome.sequence.speculation.uses_draft = False
    harness.step()
    assert len(plans) == 1, "the draft is not called"
    outcome.sequence.speculation.uses_draft = True
    start = outcome.sequence.target_len
    harness.step()
    late = plans[-1]
    assert outcome.sequence.draft_start == start
    assert late.rows.seq_lens.tolist() == [1]
    assert late.output_index.tolist() == [start + 2]
    assert late.rows.token_ids.tolist() == [outcome.token_ids[-1]]
    harness.step()
    assert (plans[-1].rows.seq_lens - plans[-1].rows.query_lens).tolist() == [1]
    np.testing.assert_array_equal(plans[-1].output_index, [outcome.sequence.draft_len + 1])
