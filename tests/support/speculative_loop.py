"""A loop over a target and a draft, one list operation at a time: what the engine does, without batching policy,
caches or text."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kimi_backend.spec_decode.protocols import Draft, Target
from kimi_backend.types.plan import (
    AuxHandle,
    DraftPlan,
    DraftReply,
    RowPlan,
    SamplingPlan,
    TargetPlan,
    TargetReply,
)

UNUSED_BLOCK_ID = 2**30


@dataclass
class LoopSequence:
    """One sequence. Lengths count tokens whose KV is valid."""

    token_ids: list[int]
    target_blocks: list[int]
    draft_blocks: list[int]
    num_speculative_tokens: int
    temperature: float = 0.0
    seed: int = 0
    target_len: int = 0
    draft_len: int = 0
    draft_token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    """Draft tokens accepted, in each verify that had some."""
    status: int = 0
    is_in_table: bool = False
    """Its draft tokens stand in the token table; `draft_token_ids` are stand-ins then."""
    row: int = 0
    """The row of the token table."""

    @property
    def is_decoding(self) -> bool:
        return len(self.token_ids) == self.target_len + 1

    def next_rows(self, chunk_size: int) -> list[int]:
        if self.is_decoding:
            return [self.token_ids[-1], *self.draft_token_ids]
        return self.token_ids[self.target_len : self.target_len + chunk_size]


@dataclass(frozen=True)
class Step:
    """The plans and replies that crossed the borders in one step."""

    target_plan: TargetPlan
    target_reply: TargetReply
    draft_plan: DraftPlan | None
    draft_reply: DraftReply | None


class SpeculativeLoop:
    """Steps all its sequences together: verify rows of those that decode, prefill chunks of the others."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        prompts: list[list[int]],
        k: int | list[int],
        *,
        in_table: bool = False,
        **fields: Any,
    ) -> None:
        """
        Args:
            in_table: whether the draft leaves its tokens in the token table.
            k: draft tokens a step, of each sequence or of all; without a draft, 0.
            fields: of every `LoopSequence`.
        """
        self._target = target
        self._draft = draft
        self._step_id = 1
        self._in_table = in_table
        self._draft_step = 0
        ks = k if isinstance(k, list) else [k] * len(prompts)
        num_blocks = target.describe().num_blocks
        order = np.random.default_rng(len(prompts)).permutation(num_blocks).tolist()
        share = num_blocks // len(prompts)
        self.sequences = []
        for index, prompt in enumerate(prompts):
            blocks = order[index * share : (index + 1) * share]
            self.sequences.append(
                LoopSequence(
                    token_ids=list(prompt),
                    target_blocks=blocks,
                    draft_blocks=[num_blocks - 1 - block for block in blocks],
                    num_speculative_tokens=ks[index],
                    row=index,
                    **fields,
                )
            )

    def run(self, num_tokens: int, chunk_size: int = 10**6) -> list[list[int]]:
        """Step until every sequence has num_tokens tokens; their first num_tokens."""
        while any(len(s.token_ids) < num_tokens for s in self.sequences):
            self.step(chunk_size)
        return [s.token_ids[:num_tokens] for s in self.sequences]

    def step(self, chunk_size: int = 10**6) -> Step:
        rows = [s.next_rows(chunk_size) for s in self.sequences]
        starts = [s.target_len for s in self.sequences]
        plan = self._target_plan(rows)
        reply = self._target.launch(plan).wait()
        self._commit(rows, plan, reply)
        if self._draft is None:
            self._step_id += 1
            return Step(plan, reply, None, None)
        draft_plan = self._draft_plan(rows, starts, plan.num_sampled_rows.tolist(), reply.aux)
        draft_reply = self._draft.launch(draft_plan).wait()
        self._keep(draft_plan, draft_reply)
        self._step_id += 1
        return Step(plan, reply, draft_plan, draft_reply)

    def _keep(self, plan: DraftPlan, reply: DraftReply) -> None:
        in_table = reply.draft_token_ids is None
        self._draft_step = plan.step_id if in_table else 0
        proposals = iter([] if reply.draft_token_ids is None else reply.draft_token_ids.tolist())
        for sequence, count in zip(self.sequences, plan.num_proposals.tolist(), strict=True):
            sequence.draft_len = sequence.target_len
            sequence.is_in_table = in_table and count > 0
            if in_table:
                sequence.draft_token_ids = [0] * count
            else:
                sequence.draft_token_ids = next(proposals)[:count] if count else []

    def _target_plan(self, rows: list[list[int]]) -> TargetPlan:
        sampled = []
        for sequence, tokens in zip(self.sequences, rows, strict=True):
            finishes = sequence.target_len + len(tokens) == len(sequence.token_ids)
            sampled.append(len(tokens) if sequence.is_decoding else int(finishes))
        sampling = [s for s, count in zip(self.sequences, sampled, strict=True) if count]
        query_lens = np.array([len(tokens) for tokens in rows], np.int32)
        is_in_table = np.array([s.is_in_table for s in self.sequences])
        return TargetPlan(
            step_id=self._step_id,
            rows=RowPlan(
                token_ids=np.concatenate(rows).astype(np.int32),
                query_lens=query_lens,
                seq_lens=np.array([s.target_len + len(r) for s, r in zip(self.sequences, rows, strict=True)], np.int32),
                block_table=_block_table([s.target_blocks for s in self.sequences]),
            ),
            table_rows=np.array([s.row for s in self.sequences], np.int32),
            num_given=np.where(is_in_table, 1, query_lens).astype(np.int32),
            num_sampled_rows=np.array(sampled, np.int32),
            sampling=_sampling(sampling),
            num_logprobs=None,
            wants_aux=np.full(len(rows), self._draft is not None),
            draft_step=self._draft_step,
        )

    def _commit(self, rows: list[list[int]], plan: TargetPlan, reply: TargetReply) -> None:
        drawn = iter(zip(reply.output_token_ids.tolist(), reply.num_accepted_tokens.tolist(), strict=True))
        for index, (sequence, tokens) in enumerate(zip(self.sequences, rows, strict=True)):
            sequence.status = int(reply.seq_status[index])
            num_sampled = int(plan.num_sampled_rows[index])
            if not num_sampled:
                sequence.target_len += len(tokens)
                continue
            token_ids, accepted = next(drawn)
            sequence.target_len += len(tokens) - (num_sampled - 1) + accepted
            sequence.token_ids += token_ids[: accepted + 1]
            if num_sampled > 1:
                sequence.accepted.append(accepted)

    def _draft_plan(self, rows: list[list[int]], starts: list[int], sampled: list[int], aux: AuxHandle) -> DraftPlan:
        first_rows = np.cumsum([0] + [len(tokens) for tokens in rows]).tolist()
        token_ids: list[int] = []
        aux_rows: list[int] = []
        for sequence, start, first_row in zip(self.sequences, starts, first_rows, strict=False):
            token_ids += sequence.token_ids[start + 1 : sequence.target_len + 1]
            aux_rows += range(first_row, first_row + sequence.target_len - start)
        lengths = np.array([s.target_len for s in self.sequences], np.int32)
        proposals = [s.num_speculative_tokens if n else 0 for s, n in zip(self.sequences, sampled, strict=True)]
        proposing = [s for s, count in zip(self.sequences, proposals, strict=True) if count]
        return DraftPlan(
            step_id=self._step_id,
            rows=RowPlan(
                token_ids=np.array(token_ids, np.int32),
                query_lens=lengths - np.array(starts, np.int32),
                seq_lens=lengths,
                block_table=_block_table([s.draft_blocks for s in self.sequences]),
            ),
            aux=aux,
            aux_rows=np.array(aux_rows, np.int64),
            table_rows=np.array([s.row for s in self.sequences], np.int32),
            num_drawn=np.zeros(len(starts), np.int32),
            num_proposals=np.array(proposals, np.int32),
            room=np.array(proposals, np.int32),
            sampling=_sampling(proposing),
            output_index=np.array([s.target_len + 1 for s in proposing], np.int64),
            in_table=self._in_table,
        )


def _block_table(blocks: list[list[int]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    table = np.full((len(blocks), max(map(len, blocks)) + 1), UNUSED_BLOCK_ID, np.int32)
    for index, ids in enumerate(blocks):
        table[index, : len(ids)] = ids
    return table


def _sampling(sequences: list[LoopSequence]) -> Any:
    return SamplingPlan.plain(
        len(sequences),
        temperature=np.array([s.temperature for s in sequences], np.float32),
        seed=np.array([s.seed for s in sequences], np.int64),
    )
