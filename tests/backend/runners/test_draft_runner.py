"""`DraftRunner` against the naive float64 draft, proposal by proposal."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.errors import InvalidRequestError
from kimi_backend.types.plan import AuxHandle, DraftPlan, RowPlan, SamplingPlan
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import STATUS_NOT_FINITE, SamplingInputs, SamplingRows, VocabularyMap
from support.naive_eagle3 import NaiveDraft
from support.tiny_checkpoints import random_draft
from support.tiny_configs import draft_config, target_config
from support.tiny_runners import BLOCK_SIZE, OwnedDraftRunner, draft_runner

TARGET = target_config()
BLOCKS = np.array([[7, 3, 39], [0, 12, 5], [20, 21, 22]], np.int32)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "MLA": ("mla", {}),
    "MLA 3.1, reduced vocabulary": ("mla31", {"draft_vocab_size": 48}),
    "MHA, sliding window": ("mha", {"sliding_window": 6}),
    "MHA, reduced vocabulary": ("mha", {"draft_vocab_size": 48}),
}


class Harness:
    """A draft runner and a naive draft for each of three sequences, fed the same rows."""

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        self.config = draft_config(kind, TARGET, **fields)
        tensors = random_draft(self.config)
        self.owned: OwnedDraftRunner = draft_runner(self.config, tensors)
        self.naive = [NaiveDraft(self.config, tensors) for _ in BLOCKS]
        self.lengths = np.zeros(3, np.int32)
        self.generator = torch.Generator().manual_seed(3)

    @property
    def token_id_of_column(self) -> torch.Tensor:
        vocabulary = self.owned.model.vocabulary_map
        return torch.arange(96) if vocabulary is None else vocabulary.token_id_of_column

    def plan(self, query_lens: list[int], num_proposals: list[int], sampling: SamplingPlan | None = None) -> DraftPlan:
        """Extend every sequence by random rows."""
        num_rows = sum(query_lens)
        self.lengths += np.array(query_lens, np.int32)
        proposals = np.array(num_proposals, np.int32)
        num_proposing = int((proposals > 0).sum())
        slots = self.lengths + np.maximum(proposals - 1, 0)
        # The draft's rows read the target's in another order.
        return DraftPlan.given(
            step_id=4,
            rows=RowPlan(
                token_ids=torch.randint(0, 96, (num_rows,), generator=self.generator).int().numpy(),
                query_lens=np.array(query_lens, np.int32),
                seq_lens=self.lengths.copy(),
                block_table=np.where(np.arange(3) < -(-slots // BLOCK_SIZE)[:, None], BLOCKS, 2**30).astype(np.int32),
            ),
            aux=AuxHandle(tensor=2 * torch.randn(num_rows + 2, 3 * 64, generator=self.generator)),
            aux_rows=torch.randperm(num_rows + 2, generator=self.generator)[:num_rows].numpy(),
            num_proposals=proposals,
            sampling=sampling or SamplingPlan.plain(num_proposing),
            output_index=(self.lengths[proposals > 0] + 1).astype(np.int64),
        )

    def naive_proposals(self, plan: DraftPlan, sampling: SamplingPlan | None = None) -> list[list[int]]:
        """Extend, then draw and feed back, one sequence and one row at a time; provisional rows are dropped."""
        start, proposing, proposals = 0, 0, []
        for index, naive in enumerate(self.naive):
            logits, hidden = torch.empty(0), torch.empty(0)
            for row in range(start, start + int(plan.rows.query_lens[index])):
                aux = plan.aux.tensor[plan.aux_rows[row]]  # type: ignore[index]
                logits, hidden = naive.row(naive.fuse(aux), int(plan.rows.token_ids[row]))
            start += int(plan.rows.query_lens[index])
            drawn: list[int] = []
            for step in range(int(plan.num_proposals[index])):
                if step:
                    logits, hidden = naive.row(hidden, drawn[-1])
                drawn.append(self._draw(logits, sampling, proposing, int(plan.rows.seq_lens[index]) + 1 + step, drawn))
            if drawn:
                proposals.append(drawn)
                proposing += 1
            del naive.rows[int(plan.rows.seq_lens[index]) :]
        return proposals

    def _draw(
        self, logits: torch.Tensor, sampling: SamplingPlan | None, proposing: int, token_index: int, drawn: list[int]
    ) -> int:
        if sampling is None:
            return int(self.token_id_of_column[logits.argmax()])
        tensors = {name: torch.from_numpy(getattr(sampling, name)) for name in SamplingPlan.__slots__}
        rows = SamplingRows(
            sequence=torch.tensor([proposing]),
            token_index=torch.tensor([token_index]),
            window_token_ids=torch.tensor([drawn + [0] * (8 - len(drawn))] * len(sampling.seed), dtype=torch.int32),
            window_len=torch.tensor([len(drawn)], dtype=torch.int32),
        )
        vocabulary: VocabularyMap | None = self.owned.model.vocabulary_map
        inputs = SamplingInputs(**tensors)
        output = KernelSet.plain().sample_tokens(logits.float()[None], inputs, rows, vocabulary)
        return int(output.token_ids[0])


def padded(proposals: list[list[int]]) -> list[list[int]]:
    width = max(map(len, proposals))
    return [drawn + [-1] * (width - len(drawn)) for drawn in proposals]


@pytest.mark.parametrize("case", CASES)
def test_greedy_proposals_over_ragged_rounds(case: str) -> None:
    """Extensions overwrite what the single-row steps of the round before left."""
    harness = Harness(*CASES[case])
    rounds = [([9, 2, 5], [3, 0, 7]), ([1, 8, 3], [4, 1, 2]), ([4, 1, 1], [0, 0, 0]), ([2, 3, 1], [7, 5, 6])]
    for query_lens, num_proposals in rounds:
        plan = harness.plan(query_lens, num_proposals)
        reply = harness.owned.runner.launch(plan).wait()
        expected = harness.naive_proposals(plan)
        assert reply.seq_status.tolist() == [0, 0, 0]
        assert reply.step_id == 4
        assert reply.draft_token_ids.tolist() == (padded(expected) if expected else [])


@pytest.mark.parametrize("case", ["MLA", "MHA, reduced vocabulary"])
def test_coupled_proposals_draw_with_the_targets_noise(case: str) -> None:
    """Temperature, filters, penalties over the window, bans and bias apply to proposals too."""
    harness = Harness(*CASES[case])
    known = harness.token_id_of_column.tolist()
    for seed in range(6):
        sampling = SamplingPlan.plain(
            2,
            temperature=np.array([1.0, 0.7], np.float32),
            seed=np.array([seed, -1 - seed], np.int64),
            top_p=np.array([1.0, 0.9], np.float32),
            presence_penalty=np.array([0.0, 30.0], np.float32),
            # A sequence with penalties brings its prompt.
            penalty_offsets=np.array([0, 0, 1], np.int32),
            penalty_ids=np.array([known[0]], np.int32),
            penalty_counts=np.array([0], np.int32),
            penalty_in_prompt=np.array([True]),
            bias_offsets=np.array([0, 0, 1], np.int32),
            bias_ids=np.array([known[3]], np.int32),
            bias_values=np.array([20.0], np.float32),
            ban_offsets=np.array([0, 1, 1], np.int32),
            ban_ids=np.array([known[5]], np.int32),
            ban_until=np.array([2**31 - 1], np.int64),
        )
        plan = harness.plan([2, 3, 1], [5, 0, 7], sampling)
        reply = harness.owned.runner.launch(plan).wait()
        assert reply.draft_token_ids.tolist() == padded(harness.naive_proposals(plan, sampling))
        # The bias makes it the first proposal, the penalty on proposals that stand before keeps it from the others.
        assert reply.draft_token_ids[1].tolist().index(known[3]) == 0
        assert known[3] not in reply.draft_token_ids[1, 1:]


def test_processors_apply_to_greedy_proposals() -> None:
    harness = Harness(*CASES["MLA"])
    sampling = SamplingPlan.plain(
        1,
        ban_offsets=np.array([0, 96 - 3], np.int32),
        ban_ids=np.array([token for token in range(96) if token not in (8, 40, 77)], np.int32),
        ban_until=np.full(96 - 3, 2**31 - 1, np.int64),
    )
    plan = harness.plan([5, 2, 1], [0, 6, 0], sampling)
    reply = harness.owned.runner.launch(plan).wait()
    assert reply.draft_token_ids.tolist() == harness.naive_proposals(plan, sampling)
    assert set(reply.draft_token_ids.flatten()) <= {8, 40, 77}


def test_a_sequence_that_stops_proposing_at_the_end_of_its_last_block() -> None:
    """It stays in the batch of the other's single-row steps, where a longer length would need a block that it lacks."""
    harness = Harness(*CASES["MLA"])
    plan = harness.plan([15, 16, 9], [2, 1, 7])
    assert plan.rows.block_table[:, 1].tolist()[1] == 2**30
    reply = harness.owned.runner.launch(plan).wait()
    assert reply.draft_token_ids.tolist() == padded(harness.naive_proposals(plan))


def test_only_slots_of_the_plan_are_written() -> None:
    """Row p writes slot p; k proposals write k - 1 rows more; nothing else."""
    harness = Harness(*CASES["MLA"])
    harness.owned.runner.launch(harness.plan([20, 5, 3], [3, 0, 1])).wait()
    written = ~harness.owned.pool.tensor[0].isnan().any(dim=2)
    expected = torch.zeros_like(written)
    for blocks, count in zip(BLOCKS, [20 + 2, 5, 3], strict=True):
        for slot in range(count):
            expected[blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE] = True
    assert torch.equal(written, expected)


@pytest.mark.parametrize("poisoned", [0, 1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sequence_whose_kv_is_not_finite_fails_alone(poisoned: int, temperature: float) -> None:
    clean, harness = Harness(*CASES["MLA"]), Harness(*CASES["MLA"])
    replies = []
    for each in (clean, harness):
        each.owned.runner.launch(each.plan([20, 20, 20], [0, 0, 0])).wait()
        if each is harness:
            each.owned.pool.tensor[0, BLOCKS[poisoned, 0], 5, 3] = float("nan")
        plan = each.plan([2, 2, 2], [3, 0, 4], SamplingPlan.plain(2, temperature=temperature))
        replies.append(each.owned.runner.launch(plan).wait())
    assert replies[0].seq_status.tolist() == [0, 0, 0]
    assert replies[1].seq_status.tolist() == np.where(np.arange(3) == poisoned, STATUS_NOT_FINITE, 0).tolist()
    for index, sequence in ((0, 0), (1, 2)):
        if sequence == poisoned:
            assert (replies[1].draft_token_ids[index] == -1).all()
        else:
            assert replies[1].draft_token_ids[index].tolist() == replies[0].draft_token_ids[index].tolist()


def test_it_describes_itself() -> None:
    harness = Harness(*CASES["MHA, reduced vocabulary"])
    description = harness.owned.runner.describe()
    assert (description.role, description.vocab_size, description.draft_vocab_size) == ("draft", 96, 48)
    assert (description.aux_layer_ids, description.hidden_size) == ((2, 3, 4), 64)


@pytest.mark.parametrize(
    ("aux", "given"),
    [(None, "NoneType given"), (torch.zeros(11, 64), r"\[11, 64\] given"), (torch.zeros(192), r"\[192\] given")],
)
def test_aux_states_that_do_not_fit_are_refused(aux: torch.Tensor | None, given: str) -> None:
    harness = Harness(*CASES["MLA"])
    plan = replace(harness.plan([3, 3, 3], [1, 1, 1]), aux=AuxHandle(tensor=aux))
    with pytest.raises(InvalidRequestError, match=rf"aux\.tensor: {given}, a tensor \[rows, 192\] is needed"):
        harness.owned.runner.launch(plan).wait()
