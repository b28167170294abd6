"""Every number of the worked example in docs/speculation.md, from real (tiny) models run by the real runners."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kimi_backend.types.plan import RowPlan
from support.markov_models import markov_draft, markov_draft_config, markov_target
from support.speculative_loop import SpeculativeLoop, Step
from support.tiny_configs import target_config
from support.tiny_runners import BLOCK_SIZE, OwnedDraftRunner, OwnedRunner, draft_runner, target_runner

DOCUMENT = Path(__file__).parents[3] / "docs" / "speculation.md"
PROMPT = [11, 22, 33, 44, 55, 66]
NUM_PROPOSALS = 3
CHUNK_SIZE = 4
NUM_STEPS = 5
ACCEPTED = [2, 0, 3]
NUM_SLOTS = 2 * BLOCK_SIZE


class Example:
    """The example, run; `written` holds, for each step, the slots that each pool's step wrote."""

    def __init__(self) -> None:
        config = target_config()
        tensors = markov_target(config)
        self.target: OwnedRunner = target_runner(config, tensors)
        draft_config = markov_draft_config(config)
        self.draft: OwnedDraftRunner = draft_runner(draft_config, markov_draft(draft_config, tensors, 0.4))
        self.loop = SpeculativeLoop(
            self.target.runner, self.draft.runner, [PROMPT], NUM_PROPOSALS, temperature=0.5, seed=51
        )
        self.sequence = self.loop.sequences[0]
        self.steps: list[Step] = []
        self.lengths: list[tuple[int, int, int]] = []
        self.written: list[tuple[list[int], list[int]]] = []
        for _ in range(NUM_STEPS):
            before = [self._forget_invalid(role) for role in ("target", "draft")]
            self.steps.append(self.loop.step(CHUNK_SIZE))
            self.written.append((self._written("target", before[0]), self._written("draft", before[1])))
            self.lengths.append((len(self.sequence.token_ids), self.sequence.target_len, self.sequence.draft_len))

    def _slots(self, role: str) -> tuple[torch.Tensor, list[int]]:
        if role == "target":
            return self.target.pool.tensor, self.sequence.target_blocks
        return self.draft.pool.tensor, self.sequence.draft_blocks

    def _forget_invalid(self, role: str) -> torch.Tensor:
        """NaN in every slot past the valid length; a copy of the pool after that."""
        tensor, blocks = self._slots(role)
        start = self.sequence.target_len if role == "target" else self.sequence.draft_len
        for slot in range(start, NUM_SLOTS):
            tensor[:, blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE] = float("nan")
        return tensor.clone()

    def _written(self, role: str, before: torch.Tensor) -> list[int]:
        """Positions whose slot changed."""
        tensor, blocks = self._slots(role)
        differs = (tensor != before) & ~(tensor.isnan() & before.isnan())
        by_slot = differs.movedim(0, -1).flatten(2).any(dim=2)
        return [slot for slot in range(NUM_SLOTS) if by_slot[blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE]]


@pytest.fixture(scope="module")
def example() -> Example:
    return Example()


def positions(rows: RowPlan) -> list[int]:
    return list(range(int(rows.seq_lens[0] - rows.query_lens[0]), int(rows.seq_lens[0])))


def span(numbers: list[int]) -> str:
    return "none" if not numbers else f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def target_table(example: Example) -> str:
    lines = ["| step | rows at | embed | draw tokens | draft | drawn | accepted | tokens | target KV |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for index, (step, (num_tokens, target_len, _)) in enumerate(zip(example.steps, example.lengths, strict=True)):
        plan, reply = step.target_plan, step.target_reply
        rows, num_sampled = positions(plan.rows), int(plan.num_sampled_rows[0])
        tokens = plan.rows.token_ids.tolist()
        drawn = [token for token in reply.output_token_ids.flatten().tolist() if token >= 0]
        accepted = str(len(drawn) - 1) if num_sampled > 1 else "-"
        cells = [
            str(index),
            span(rows),
            " ".join(map(str, tokens)),
            span([row + 1 for row in rows[len(rows) - num_sampled :]]),
            " ".join(map(str, tokens[1:])) if num_sampled > 1 else "-",
            " ".join(map(str, drawn)) or "-",
            accepted,
            str(num_tokens),
            str(target_len),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draft_table(example: Example) -> str:
    lines = ["| step | extends over | embed | aux rows | proposes tokens | proposals | provisional rows | draft KV |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for index, (step, (_, _, draft_len)) in enumerate(zip(example.steps, example.lengths, strict=True)):
        plan, reply = step.draft_plan, step.draft_reply
        assert plan is not None and reply is not None
        count = int(plan.num_proposals[0])
        first = int(plan.output_index[0]) if count else 0
        cells = [
            str(index),
            span(positions(plan.rows)),
            " ".join(map(str, plan.rows.token_ids.tolist())),
            span(plan.aux_rows.tolist()),
            span([first + step for step in range(count)]),
            " ".join(map(str, reply.draft_token_ids.flatten().tolist())) or "-",
            span([draft_len + step for step in range(count - 1)]),
            str(draft_len),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


@pytest.mark.parametrize("table", [target_table, draft_table])
def test_the_document_shows_what_the_models_do(example: Example, table: object) -> None:
    assert callable(table)
    text = table(example)
    assert text in DOCUMENT.read_text(encoding="utf-8"), f"docs/speculation.md should hold:\n{text}"


def test_the_example_accepts_some_none_and_all(example: Example) -> None:
    assert example.sequence.accepted == ACCEPTED
    assert example.sequence.token_ids[:6] == PROMPT


def test_lengths_follow_the_algebra(example: Example) -> None:
    """n + 1 tokens and n valid rows before a verify; n + a + 2 and n + a + 1 in both pools after it."""
    for (tokens_before, target_before, draft_before), after, accepted in zip(
        example.lengths[1:], example.lengths[2:], ACCEPTED, strict=False
    ):
        n = target_before
        assert (tokens_before, draft_before) == (n + 1, n)
        assert after == (n + accepted + 2, n + accepted + 1, n + accepted + 1)
    completion_tokens = 1 + sum(accepted + 1 for accepted in ACCEPTED)
    assert len(example.sequence.token_ids) == len(PROMPT) + completion_tokens


def test_each_row_writes_its_own_slot_and_no_other(example: Example) -> None:
    for step, (target_slots, draft_slots) in zip(example.steps, example.written, strict=True):
        assert step.draft_plan is not None
        assert target_slots == positions(step.target_plan.rows)
        extended = positions(step.draft_plan.rows)
        provisional = max(int(step.draft_plan.num_proposals[0]) - 1, 0)
        assert draft_slots == extended + [extended[-1] + 1 + row for row in range(provisional)]


def test_rows_pair_the_hidden_state_at_p_with_the_token_at_p_plus_1(example: Example) -> None:
    tokens = np.array(example.sequence.token_ids)
    for step in example.steps:
        assert step.draft_plan is not None
        rows = positions(step.draft_plan.rows)
        assert step.draft_plan.rows.token_ids.tolist() == tokens[np.array(rows) + 1].tolist()
        target_rows = positions(step.target_plan.rows)
        assert [target_rows[row] for row in step.draft_plan.aux_rows] == rows
        if step.draft_plan.num_proposals[0]:
            assert step.draft_plan.output_index.tolist() == [rows[-1] + 2]


def test_the_text_is_that_of_the_target_alone(example: Example) -> None:
    alone = SpeculativeLoop(example.target.runner, None, [PROMPT], 0, temperature=0.5, seed=51)
    assert alone.run(len(example.sequence.token_ids))[0] == example.sequence.token_ids
