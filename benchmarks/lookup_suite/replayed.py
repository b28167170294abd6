"""Runners that say again what a pair said: an engine's choices over recorded texts, without a weight being read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kimi_backend.types.plan import AuxHandle, DraftPlan, DraftReply, RunnerDescription, TargetPlan, TargetReply
from kimi_backend.types.step_costs import StepCosts
from lookup_suite.recorded import RecordedText

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, VOCAB_SIZE = 64, 4096, 4096, 4096


@dataclass(frozen=True, slots=True)
class Answered:
    """A step whose reply is there."""

    reply: Any
    on_wait: Callable[[], None] = lambda: None

    def wait(self) -> Any:
        self.on_wait()
        return self.reply


class ReplayedTarget:
    """Draws the texts; a request's seed is its text's number."""

    depth = 0

    def __init__(self, texts: Sequence[RecordedText], costs: StepCosts) -> None:
        self._texts, self._costs = texts, costs
        self.last_num_tokens = 0
        """Tokens that the last step emitted whose reply was waited for."""
        self.num_checks = self.num_kept = 0
        """Verifies with draft tokens, and those of the tokens that were kept."""

    def describe(self) -> RunnerDescription:
        return _described("target")

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

        def note() -> None:
            self.last_num_tokens = sum(map(len, drawn))

        return Answered(reply, note)


class ReplayedDraft:
    """Proposes what the pair's draft proposed there, whatever its own KV has."""

    depth = 0

    def __init__(self, texts: Sequence[RecordedText], costs: StepCosts) -> None:
        self._texts, self._costs = texts, costs

    def describe(self) -> RunnerDescription:
        return _described("draft")

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


def _described(role: str) -> RunnerDescription:
    return RunnerDescription(
        role=role,
        runner_epoch=1,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_num_batched_tokens=2048,
        max_num_seqs=32,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=VOCAB_SIZE if role == "draft" else None,
        aux_layer_ids=(2, 10, 18),
        hidden_size=64,
        kv_cache_dtype="float32",
        device="cpu",
    )
