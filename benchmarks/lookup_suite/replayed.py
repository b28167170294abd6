"""Runners that say again what a pair said: an engine's choices over recorded texts, without a weight being read."""

from collections.abc import Sequence

import numpy as np

from engine_overhead import Answered, describe
from kimi_backend.types.plan import AuxHandle, DraftPlan, DraftReply, RunnerDescription, TargetPlan, TargetReply
from kimi_backend.types.step_costs import StepCosts
from lookup_suite.recorded import RecordedText

MOST_SEQUENCES, VOCAB_SIZE = 32, 4096


class ReplayedTarget:
    """Draws the texts; a request's seed is its text's number."""

    depth = 0

    def __init__(self, texts: Sequence[RecordedText], costs: StepCosts) -> None:
        self._texts, self._costs = texts, costs
        self.num_checks = self.num_kept = 0
        """Verifies with draft tokens, and those of the tokens that were kept."""

    def describe(self) -> RunnerDescription:
        return describe("target", MOST_SEQUENCES, VOCAB_SIZE)

    def measure_costs(self) -> StepCosts:
        return self._costs

    def launch(self, plan: TargetPlan) -> Answered:
        sampling, ends = np.flatnonzero(plan.num_sampled_rows), plan.rows.query_lens.cumsum()
        drawn = []
        for seed, index in zip(plan.sampling.seed.tolist(), sampling.tolist(), strict=True):
            count, end = int(plan.num_sampled_rows[index]), int(ends[index])
            text = self._texts[seed]
            place = int(plan.rows.seq_lens[index]) - count + 1 - len(text.prompt)
            true, guesses = text.tokens[place : place + count], plan.rows.token_ids[end - count + 1 : end].tolist()
            kept = next((i for i, guess in enumerate(guesses) if guess != true[i]), len(guesses))
            drawn.append(true[: kept + 1])
            self.num_checks, self.num_kept = self.num_checks + (count > 1), self.num_kept + kept
        tokens = np.full((len(drawn), int(plan.num_sampled_rows.max(initial=1))), -1, np.int64)
        for row, of_row in enumerate(drawn):
            tokens[row, : len(of_row)] = of_row
        reply = TargetReply(
            step_id=plan.step_id,
            runner_epoch=1,
            seq_status=np.zeros(len(ends), np.int32),
            output_token_ids=tokens,
            num_accepted_tokens=np.array([len(of_row) - 1 for of_row in drawn], np.int32),
            aux=AuxHandle(),
        )
        return Answered(reply)


class ReplayedDraft:
    """Proposes what the pair's draft proposed there, whatever its own KV has."""

    depth = 0

    def __init__(self, texts: Sequence[RecordedText], costs: StepCosts) -> None:
        self._texts, self._costs = texts, costs

    def describe(self) -> RunnerDescription:
        return describe("draft", MOST_SEQUENCES, VOCAB_SIZE)

    def measure_costs(self) -> StepCosts:
        return self._costs

    def launch(self, plan: DraftPlan) -> Answered:
        counts, width = plan.num_wanted[plan.num_proposals > 0].tolist(), int(plan.num_proposals.max(initial=0))
        tokens = np.full((len(counts), width), -1, np.int64)
        places = zip(plan.sampling.seed.tolist(), plan.output_index.tolist(), counts, strict=True)
        for row, (seed, index, count) in enumerate(places):
            text = self._texts[seed]
            if count:  # nothing was recorded for the last token, which nobody may draft
                tokens[row, :count] = text.proposals[index - len(text.prompt)][:count]
        status = np.zeros(len(plan.num_proposals), np.int32)
        return Answered(DraftReply(step_id=plan.step_id, runner_epoch=1, seq_status=status, draft_token_ids=tokens))
