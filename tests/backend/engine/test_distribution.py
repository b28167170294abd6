"""The first two sampled tokens have the target's distribution, for a bad draft too.

The expectation is computed in float64 from the formulas of the processors, by code that the product does not share.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.plan import TargetPlan, TargetReply
from kimi_backend.types.request import GenerateRequest, SamplingParams
from support.chi_square import chi_square_p_value
from support.engine_runs import generate
from support.scripted_logits import LogitScript, prefix_hash
from support.scripted_models import RowGrid, ScriptedDraft, ScriptedTarget, describe

VOCAB = 8
NUM_DRAWS = 6_000
PROMPT = (3, 1, 4)
SCRIPT = LogitScript(VOCAB, scales=(3.0,))
PARAMS = SamplingParams(temperature=1.2, top_k=6, top_p=0.95, presence_penalty=0.8, max_tokens=3)
Floats = npt.NDArray[np.float64]


def draw_pairs(target: ScriptedTarget) -> npt.NDArray[np.int64]:
    """[NUM_DRAWS, 2] first two tokens of requests that differ by their seeds only."""
    requests = [
        GenerateRequest(
            request_id=str(seed),
            prompt_token_ids=PROMPT,
            sampling=replace(PARAMS, seed=seed),
            num_speculative_tokens=2,
        )
        for seed in range(NUM_DRAWS)
    ]
    draft = ScriptedDraft(describe("draft", SCRIPT, num_blocks=2048), SCRIPT, agreement=0.0)
    outcomes = generate(target, draft, requests, SchedulerSettings(max_num_seqs=512, max_num_batched_tokens=2048))
    assert sum(len(outcome.rounds) for outcome in outcomes) >= NUM_DRAWS
    return np.array([outcome.token_ids[:2] for outcome in outcomes])


def expected_distribution(output: list[int]) -> Floats:
    """[VOCAB] of the next token after the prompt and `output`."""
    hashes = np.array([prefix_hash([*PROMPT, *output])], np.uint64)
    logits = SCRIPT.logits(hashes)[0].astype(np.float64)
    logits[sorted(set(output))] -= PARAMS.presence_penalty
    weights = np.exp(logits / PARAMS.temperature)
    weights[np.argsort(-weights)[PARAMS.top_k :]] = 0
    share = weights / weights.sum()
    mass_above = np.array([share[share > own].sum() for own in share])
    weights[mass_above >= PARAMS.top_p] = 0
    return weights / weights.sum()


def p_value(pairs: npt.NDArray[np.int64]) -> float:
    """The p-value of the joint distribution of both tokens."""
    first = expected_distribution([])
    return chi_square_p_value(pairs, np.stack([first[t] * expected_distribution([t]) for t in range(VOCAB)]))


def test_a_bad_draft_does_not_change_the_distribution() -> None:
    target = ScriptedTarget(describe("target", SCRIPT, num_blocks=2048), SCRIPT)
    assert p_value(draw_pairs(target)) > 1e-3


class AcceptsTopTwo(ScriptedTarget):
    """Planted fault: a draft token passes when it is among the target's two most likely."""

    def _verify(self, plan: TargetPlan) -> TargetReply:
        rows = RowGrid(plan.rows, plan, self.tokens)
        reply = super()._verify(plan)
        hashes = rows.chain(self.store.read_prefixes(plan.rows.block_table, rows.starts))
        tokens, accepted = reply.output_token_ids.copy(), reply.num_accepted_tokens.copy()
        sampling = np.flatnonzero(plan.num_sampled_rows)
        for index, sequence in enumerate(sampling.tolist()):
            if plan.num_sampled_rows[sequence] == 2 and accepted[index] == 0:
                top = np.argsort(-self.script.logits(hashes[sequence, :1])[0])[:2]
                if rows.tokens[sequence, 1] in top:
                    tokens[index, :2] = rows.tokens[sequence, 1], 0
                    accepted[index] = 1
        return replace(reply, output_token_ids=tokens, num_accepted_tokens=accepted)


def test_the_test_sees_a_lossy_acceptance_rule() -> None:
    target = AcceptsTopTwo(describe("target", SCRIPT, num_blocks=2048), SCRIPT)
    assert p_value(draw_pairs(target)) < 1e-6
