"""A hand-worked run: every number of both models' plans, for a prompt of 6 tokens cut at 4, k = 2, block size 4.

step 1  target rows 0–3 of the prompt, nothing drawn      draft extends rows 0–3, embedding tokens 1–4
step 2  target rows 4–5, token 6 is drawn                 draft extends rows 4–5, embedding 5–6, proposes 7 and 8
step 3  target rows 6–8 verify both, one is accepted      draft extends rows 6–7, embedding 7–8, proposes 9 and 10
step 4  target rows 8–10 verify both, none is accepted    draft extends row 8, embedding 9, proposes 10 and 11
"""

import numpy as np

from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.plan import AuxHandle, DraftPlan, DraftReply, TargetPlan, TargetReply
from kimi_backend.types.request import GenerateRequest, SamplingParams
from support.engine_runs import EngineHarness
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedPending, ScriptedRunner, describe

SCRIPT = LogitScript(100)
PROMPT = (10, 11, 12, 13, 14, 15)
DRAWN = [[], [16], [17, 18], [19]]
PROPOSED = [[], [17, 88], [99, 98], [97, 96]]


class PreparedTarget(ScriptedRunner):
    """Answers what is prepared and keeps the plans."""

    depth = 0

    def __init__(self) -> None:
        super().__init__(describe("target", SCRIPT), SCRIPT)
        self.plans: list[TargetPlan] = []

    def launch(self, plan: TargetPlan) -> ScriptedPending:
        tokens = DRAWN[len(self.plans)]
        self.plans.append(plan)
        width = int(plan.num_sampled_rows.max())
        output = np.full((1 if tokens else 0, max(width, 1)), -1, np.int64)
        output[:, : len(tokens)] = tokens
        reply = TargetReply(
            step_id=plan.step_id,
            runner_epoch=1,
            seq_status=np.zeros(1, np.int32),
            output_token_ids=output,
            num_accepted_tokens=np.array([len(tokens) - 1] if tokens else [], np.int32),
            aux=AuxHandle(tensor=plan.step_id),
        )
        return ScriptedPending([reply], reply)


class PreparedDraft(ScriptedRunner):
    """A draft that replies with what the test prepared."""

    depth = 0

    def __init__(self) -> None:
        super().__init__(describe("draft", SCRIPT), SCRIPT)
        self.plans: list[DraftPlan] = []

    def launch(self, plan: DraftPlan) -> ScriptedPending:
        tokens = PROPOSED[len(self.plans)]
        self.plans.append(plan)
        reply = DraftReply(
            step_id=plan.step_id,
            runner_epoch=1,
            seq_status=np.zeros(1, np.int32),
            draft_token_ids=np.array([tokens] if tokens else np.zeros((0, 0)), np.int64),
        )
        return ScriptedPending([reply], reply)


def run_four_steps() -> tuple[list[TargetPlan], list[DraftPlan]]:
    target, draft = PreparedTarget(), PreparedDraft()
    harness = EngineHarness(target, draft, SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=4))
    harness.add(
        GenerateRequest(
            request_id="r",
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(seed=2**64 - 1, max_tokens=50, min_tokens=2, stop_token_ids=(3,)),
            num_speculative_tokens=2,
        )
    )
    for _ in range(4):
        assert harness.step()
    return target.plans, draft.plans


def test_target_plans() -> None:
    plans, _ = run_four_steps()
    assert [plan.step_id for plan in plans] == [1, 2, 3, 4]
    assert [plan.rows.token_ids.tolist() for plan in plans] == [
        [10, 11, 12, 13],
        [14, 15],
        [16, 17, 88],
        [18, 99, 98],
    ]
    assert [plan.rows.query_lens.tolist() for plan in plans] == [[4], [2], [3], [3]]
    assert [plan.rows.seq_lens.tolist() for plan in plans] == [[4], [6], [9], [11]]
    assert [plan.num_sampled_rows.tolist() for plan in plans] == [[0], [1], [3], [3]]
    assert [plan.rows.block_table.shape for plan in plans] == [(1, 1), (1, 2), (1, 3), (1, 3)]
    assert all(plan.wants_aux.tolist() == [True] for plan in plans)
    assert [len(plan.sampling.seed) for plan in plans] == [0, 1, 1, 1]
    assert plans[1].sampling.seed.tolist() == [-1]
    assert plans[1].sampling.ban_until.tolist() == [8]
    assert plans[0].num_logprobs is None


def test_draft_plans() -> None:
    _, plans = run_four_steps()
    assert [plan.aux.tensor for plan in plans] == [1, 2, 3, 4]
    assert [plan.rows.token_ids.tolist() for plan in plans] == [[11, 12, 13, 14], [15, 16], [17, 18], [19]]
    assert [plan.rows.query_lens.tolist() for plan in plans] == [[4], [2], [2], [1]]
    assert [plan.rows.seq_lens.tolist() for plan in plans] == [[4], [6], [8], [9]]
    assert [plan.aux_rows.tolist() for plan in plans] == [[0, 1, 2, 3], [0, 1], [0, 1], [0]]
    assert [plan.num_proposals.tolist() for plan in plans] == [[0], [2], [2], [2]]
    assert [plan.output_index.tolist() for plan in plans] == [[], [7], [9], [10]]
    # Rows up to seq_len + 2 - 2 are written: 4, 7, 9 and 10 slots.
    assert [plan.rows.block_table.shape for plan in plans] == [(1, 1), (1, 2), (1, 3), (1, 3)]


def test_arrays_have_the_dtypes_of_the_contract() -> None:
    targets, drafts = run_four_steps()
    for plan in (*targets, *drafts):
        for name in ("token_ids", "query_lens", "seq_lens", "block_table"):
            assert getattr(plan.rows, name).dtype == np.int32, name
    assert {plan.aux_rows.dtype for plan in drafts} == {np.dtype(np.int64)}
    assert {plan.output_index.dtype for plan in drafts} == {np.dtype(np.int64)}
    assert {plan.num_sampled_rows.dtype for plan in targets} == {np.dtype(np.int32)}
