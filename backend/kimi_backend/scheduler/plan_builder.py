"""Turns scheduled sequences into the two models' plans.

Dimensions as in `types.plan`: S sequences and T rows in a step, B of the sequences sample or propose.
"""

from dataclasses import dataclass

import numpy as np

from kimi_backend.scheduler.batch_table import BatchTable
from kimi_backend.scheduler.sampling_table import SamplingPlanBuilder
from kimi_backend.scheduler.scheduler import StepBatch
from kimi_backend.scheduler.sequence import Sequence
from kimi_backend.types.plan import (
    AuxHandle,
    DraftPlan,
    DraftReply,
    FollowPlan,
    Int32Array,
    Int64Array,
    RowPlan,
    TargetPlan,
    TargetReply,
    TokenHandle,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """A draft step that may follow a verify, and what it is about."""

    plan: DraftPlan
    sequences: list[Sequence]
    """[S] of the plan."""

    def work(self, num_accepted_tokens: Int32Array) -> list["DraftWork"]:
        """[S] what the step did, once it is known what was accepted. Sequences that have ended are among them."""
        follow = self.plan.follow
        assert isinstance(follow, FollowPlan)
        accepted = num_accepted_tokens[follow.drawn_rows]
        counts = np.maximum(np.minimum(follow.room - accepted, self.plan.num_proposals), 0)
        first_rows = (np.cumsum(self.plan.rows.query_lens) - self.plan.rows.query_lens).tolist()
        return [
            DraftWork(sequence=sequence, first_target_row=first_row, num_rows=rows, num_proposals=count)
            for sequence, first_row, rows, count in zip(
                self.sequences, first_rows, (accepted + 1).tolist(), counts.tolist(), strict=True
            )
        ]


@dataclass(slots=True, kw_only=True)
class DraftWork:
    """What the draft shall do for one sequence after a step. Not frozen: that takes three times as long to make."""

    sequence: Sequence
    first_target_row: int
    """The sequence's first row in the target step."""
    num_rows: int
    """Rows to extend over, from the sequence's `draft_len` on."""
    num_proposals: int


class PlanBuilder:
    """Builds plans over one batch table."""

    def __init__(self, table: BatchTable, block_size: int, vocab_size: int, *, launch_ahead: bool = False) -> None:
        """launch_ahead: the setting of that name."""
        self._launch_ahead = launch_ahead
        self._table = table
        self._block_size = block_size
        self._mask_words = -(-vocab_size // 32)
        self._target_sampling = SamplingPlanBuilder(table.sampling)
        self._draft_sampling = SamplingPlanBuilder(table.sampling)

    def target_plan(self, step_id: int, batch: StepBatch, draft_tokens: TokenHandle | None = None) -> TargetPlan:
        """The verify rows and prefill chunks of a scheduled step. draft_tokens: what the last draft step left."""
        sequences, num_rows, num_decodes = batch.sequences, batch.num_rows, batch.num_decodes
        rows = _int64([s.row for s in sequences])
        query_lens = np.array(num_rows, np.int32)
        seq_lens = np.array([s.target_len for s in sequences], np.int32) + query_lens
        num_sampled = query_lens
        parts = [_leading(self._table.pending_token_ids[rows[:num_decodes]], query_lens[:num_decodes])]
        sampling_sequences, sampling_rows = sequences, rows
        if num_decodes < len(sequences):
            num_sampled = query_lens.copy()
            for index in range(num_decodes, len(sequences)):
                sequence, end = sequences[index], int(seq_lens[index])
                parts.append(sequence.token_ids[sequence.target_len : end])
                num_sampled[index] = end == sequence.num_tokens
            sampling_sequences = [s for s, sampled in zip(sequences, num_sampled.tolist(), strict=True) if sampled]
            sampling_rows = rows[num_sampled > 0]
        return TargetPlan(
            step_id=step_id,
            rows=RowPlan(
                token_ids=np.concatenate(parts) if len(parts) > 1 else parts[0],
                query_lens=query_lens,
                seq_lens=seq_lens,
                block_table=self._block_table(self._table.target_blocks, rows, int(seq_lens.max())),
            ),
            num_sampled_rows=num_sampled,
            sampling=self._target_sampling.build(sampling_rows, sampling_sequences),
            num_logprobs=_most_logprobs(sampling_sequences),
            wants_aux=np.array([s.uses_draft for s in sequences], np.bool_),
            logit_mask=self._logit_mask(sampling_sequences, num_sampled[num_sampled > 0]),
            draft_tokens=draft_tokens or TokenHandle(),
            draft_columns=None if draft_tokens is None else self._draft_columns(rows, query_lens, num_decodes),
        )

    def next_plan(self, plan: TargetPlan, sequences: list[Sequence], drawn_rows: list[int]) -> TargetPlan:
        """The step behind one that is in flight, each of whose sequences decodes one token: the same for some of them,
        one token further on.

        Args:
            drawn_rows: where in the plan in flight the sequences stand.
        """
        rows, drawn = _int64([s.row for s in sequences]), np.array(drawn_rows, np.int32)
        ones, seq_lens = np.ones(len(sequences), np.int32), plan.rows.seq_lens[drawn] + 1
        return TargetPlan(
            step_id=plan.step_id + 1,
            rows=RowPlan(
                token_ids=np.zeros(len(sequences), np.int32),
                query_lens=ones,
                seq_lens=seq_lens,
                block_table=self._block_table(self._table.target_blocks, rows, int(seq_lens.max())),
            ),
            num_sampled_rows=ones,
            sampling=self._target_sampling.build(rows, sequences),
            num_logprobs=None,
            wants_aux=np.zeros(len(sequences), np.bool_),
            drawn_rows=drawn,
        )

    def _draft_columns(self, rows: Int64Array, query_lens: Int32Array, num_decodes: int) -> Int32Array:
        columns = np.where(query_lens > 1, self._table.draft_columns[rows], -1)
        columns[num_decodes:] = -1
        return columns

    def draft_plan(self, step_id: int, work: list[DraftWork], aux: AuxHandle) -> DraftPlan:
        """Extend over verified rows, then propose. Call it after the step's tokens were appended."""
        sequences = [w.sequence for w in work]
        rows = _int64([s.row for s in sequences])
        query_lens = np.array([w.num_rows for w in work], np.int32)
        lengths = np.array([s.draft_len for s in sequences], np.int32) + query_lens
        seq_lens = lengths - np.array([s.draft_start for s in sequences], np.int32)
        num_proposals = np.array([w.num_proposals for w in work], np.int32)
        proposing = [s for s, count in zip(sequences, num_proposals.tolist(), strict=True) if count]
        is_proposing = num_proposals > 0
        # Row p embeds token p + 1.
        token_ids = [
            s.token_ids[s.draft_len + 1 : s.draft_len + 1 + w.num_rows] for s, w in zip(sequences, work, strict=True)
        ]
        aux_starts = _int64([w.first_target_row for w in work])
        return DraftPlan(
            step_id=step_id,
            rows=RowPlan(
                token_ids=np.concatenate(token_ids),
                query_lens=query_lens,
                seq_lens=seq_lens,
                block_table=self._block_table(
                    self._table.draft_blocks, rows, int((seq_lens + np.maximum(num_proposals - 1, 0)).max())
                ),
            ),
            aux=aux,
            aux_rows=_ragged_ranges(aux_starts, query_lens),
            num_proposals=num_proposals,
            greedy=np.array([s.speculation.is_greedy for s in proposing], np.bool_),
            sampling=self._draft_sampling.build(rows[is_proposing], proposing),
            output_index=lengths[is_proposing].astype(np.int64) + 1,
            leaves_tokens=self._launch_ahead,
        )

    def following(self, batch: StepBatch, target: TargetPlan) -> Following | None:
        """A draft step behind a verify that is about to be launched; None where a prompt is in the step, or nobody
        could use what is proposed.

        A sequence's draft KV must reach as far as its target KV, or will when the draft step in flight is settled.
        """
        index = [i for i, s in enumerate(batch.sequences) if s.uses_draft]
        if not index or batch.num_decodes < len(batch.sequences):
            return None
        sequences = [batch.sequences[i] for i in index]
        rows = _int64([s.row for s in sequences])
        query_lens, lengths = target.rows.query_lens[index], target.rows.seq_lens[index]
        seq_lens = lengths - np.array([s.draft_start for s in sequences], np.int32)
        # As if the verify accepted nothing.
        remaining = [s.num_remaining_tokens - 1 for s in sequences]
        most = np.array(
            [s.speculation.num_draft_tokens(left) for s, left in zip(sequences, remaining, strict=True)], np.int32
        )
        if not most.any():
            return None
        room = np.array(remaining, np.int32) - 1
        proposing = [s for s, count in zip(sequences, most.tolist(), strict=True) if count]
        first_rows = np.cumsum(target.rows.query_lens, dtype=np.int64) - target.rows.query_lens
        last_steps = np.maximum(np.minimum(most, room - (query_lens - 1)) - 1, 0)
        plan = DraftPlan(
            step_id=target.step_id,
            rows=RowPlan(
                token_ids=np.zeros(int(query_lens.sum()), np.int32),
                query_lens=query_lens,
                seq_lens=seq_lens,
                block_table=self._block_table(self._table.draft_blocks, rows, int((seq_lens + last_steps).max())),
            ),
            aux=AuxHandle(),
            aux_rows=_ragged_ranges(first_rows[index], query_lens),
            num_proposals=most,
            greedy=np.array([s.speculation.is_greedy for s in proposing], np.bool_),
            sampling=self._draft_sampling.build(rows[most > 0], proposing),
            output_index=lengths[most > 0].astype(np.int64) + 1,
            follow=FollowPlan(
                drawn_rows=np.array(index, np.int32),
                room=room,
                first_index=_int64([s.num_tokens + 1 for s in sequences]),
            ),
            leaves_tokens=True,
        )
        return Following(plan=plan, sequences=sequences)

    def _block_table(self, blocks: Int32Array, rows: Int64Array, num_slots: int) -> Int32Array:
        return blocks[rows, : -(-num_slots // self._block_size)]

    def _logit_mask(self, sequences: list[Sequence], num_sampled: Int32Array) -> Int32Array | None:
        if not any(s.params.allowed_token_ids for s in sequences):
            return None
        masks = np.full((len(sequences), self._mask_words), -1, np.int32)
        for index, sequence in enumerate(sequences):
            if sequence.params.allowed_token_ids:
                masks[index] = sequence.allowed_mask(self._mask_words)
        return np.repeat(masks, num_sampled, axis=0)


def store_proposals(
    table: BatchTable, sequences: list[Sequence], plan: DraftPlan, reply: DraftReply, vocab_size: int
) -> None:
    """Keep the draft's tokens for the next verify, or where they stand on the device.

    Args:
        sequences: [S] those of the plan.

    Raises:
        ValueError: a proposal is no token of the target's vocabulary; nothing has changed then.
    """
    is_proposing = plan.num_proposals > 0
    rows = _int64([s.row for s in sequences])[is_proposing]
    if reply.tokens.num_seqs:
        table.pending_token_ids[rows, 1:] = 0
        table.draft_columns[rows] = np.flatnonzero(is_proposing)
    else:
        _store_token_ids(table, rows, plan, reply, vocab_size)
        table.draft_columns[rows] = -1
    for sequence, count in zip(sequences, plan.num_proposals.tolist(), strict=True):
        sequence.num_draft_tokens = count


def store_followed(table: BatchTable, work: list[DraftWork]) -> None:
    """Likewise of a draft step that followed a verify: [S] what it did. Sequences that have ended, or go on without a
    draft, are left as they are."""
    for column, item in enumerate(work):
        sequence = item.sequence
        if sequence.uses_draft:
            table.draft_columns[sequence.row] = column
            sequence.num_draft_tokens = item.num_proposals


def _store_token_ids(table: BatchTable, rows: Int64Array, plan: DraftPlan, reply: DraftReply, vocab_size: int) -> None:
    proposals = reply.draft_token_ids
    if proposals.size and (proposals.min() < 0 or proposals.max() >= vocab_size):
        _check_wanted(proposals, plan, reply, vocab_size)
    table.pending_token_ids[rows, 1 : 1 + proposals.shape[1]] = proposals


def _check_wanted(proposals: Int64Array, plan: DraftPlan, reply: DraftReply, vocab_size: int) -> None:
    """Nobody looks at what is behind a sequence's last proposal, or at those of a sequence that failed."""
    is_proposing = plan.num_proposals > 0
    is_wanted = np.arange(proposals.shape[1]) < plan.num_proposals[is_proposing][:, None]
    is_wanted &= reply.seq_status[is_proposing][:, None] == 0
    wrong = proposals[is_wanted & ((proposals < 0) | (proposals >= vocab_size))]
    if wrong.size:
        raise ValueError(f"the draft proposed token {wrong[0]}, 0 to {vocab_size - 1} is allowed")


def first_rows(plan: TargetPlan) -> list[int]:
    """[S] the first row of each sequence in a target step."""
    ends = np.cumsum(plan.rows.query_lens)
    first: list[int] = (ends - plan.rows.query_lens).tolist()
    return first


def emitted_tokens(reply: TargetReply) -> list[list[int]]:
    """[B] accepted draft tokens and the target's own token of each sampling sequence."""
    counts = (reply.num_accepted_tokens + 1).tolist()
    return [ids[:count] for ids, count in zip(reply.output_token_ids.tolist(), counts, strict=True)]


def _leading(values: Int32Array, counts: Int32Array) -> Int32Array:
    """values[i, :counts[i]] of every row, joined."""
    return values[np.arange(values.shape[1]) < counts[:, None]]


def _ragged_ranges(starts: Int64Array, counts: Int32Array) -> Int64Array:
    """starts[i], starts[i] + 1, … counts[i] of them for every i, joined."""
    ends = np.cumsum(counts, dtype=np.int64)
    within: Int64Array = np.arange(ends[-1], dtype=np.int64)
    return np.repeat(starts - (ends - counts), counts) + within


def _int64(values: list[int]) -> Int64Array:
    return np.array(values, np.int64)


def _most_logprobs(sequences: list[Sequence]) -> int | None:
    wanted = [s.params.logprobs for s in sequences if s.params.logprobs is not None]
    return max(wanted) if wanted else None
