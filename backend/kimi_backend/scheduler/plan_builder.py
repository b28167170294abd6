"""Turns scheduled sequences into the two models' plans.

Dimensions as in `types.plan`: S sequences and T rows in a step, B of the sequences sample or propose.
"""

import numpy as np

from kimi_backend.scheduler.batch_table import BatchTable
from kimi_backend.scheduler.prompt_scores import scoring_plan
from kimi_backend.scheduler.sampling_table import SamplingPlanBuilder
from kimi_backend.scheduler.scheduler import StepBatch
from kimi_backend.scheduler.sequence import Sequence, token_mask
from kimi_backend.types.plan import (
    AuxHandle,
    DraftPlan,
    DraftReply,
    Int32Array,
    Int64Array,
    RowPlan,
    TargetPlan,
    TargetReply,
)
from kimi_backend.types.request import TokenOrigin


class PlanBuilder:
    """Builds plans over one batch table."""

    def __init__(self, table: BatchTable, block_size: int, vocab_size: int) -> None:
        self._table = table
        self._block_size = block_size
        self._mask_words = -(-vocab_size // 32)
        self._target_sampling = SamplingPlanBuilder(table.sampling)
        self._draft_sampling = SamplingPlanBuilder(table.sampling)

    def target_plan(self, step_id: int, batch: StepBatch, draft_step: int = 0) -> TargetPlan:
        """The verify rows and prefill chunks of a scheduled step. draft_step: see `TargetPlan.draft_step`."""
        sequences, num_rows, num_decodes = batch.sequences, batch.num_rows, batch.num_decodes
        rows = _int64([s.row for s in sequences])
        query_lens = np.array(num_rows, np.int32)
        seq_lens = np.array([s.target_len for s in sequences], np.int32) + query_lens
        num_sampled = query_lens
        num_given = np.where(self._table.is_in_table[rows], 1, query_lens)
        num_given[num_decodes:] = query_lens[num_decodes:]
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
        logit_mask, masked_rows = self._masks(sampling_sequences, num_sampled[num_sampled > 0])
        return TargetPlan(
            step_id=step_id,
            rows=RowPlan(
                token_ids=np.concatenate(parts) if len(parts) > 1 else parts[0],
                query_lens=query_lens,
                seq_lens=seq_lens,
                block_table=self._block_table(self._table.target_blocks, rows, int(seq_lens.max())),
            ),
            table_rows=rows.astype(np.int32),
            num_given=num_given.astype(np.int32),
            num_sampled_rows=num_sampled,
            sampling=self._target_sampling.build(sampling_rows, sampling_sequences),
            num_logprobs=_most_logprobs(sampling_sequences),
            wants_aux=np.array([s.uses_draft for s in sequences], np.bool_),
            logit_mask=logit_mask,
            masked_rows=masked_rows,
            draft_step=draft_step,
            scoring=scoring_plan(sequences, query_lens) if num_decodes < len(sequences) else None,
        )

    def next_plan(self, plan: TargetPlan, sequences: list[Sequence], index: list[int]) -> TargetPlan:
        """The step behind one that is in flight, each of whose sequences decodes one token: the same for some of them,
        one token further on.

        Args:
            index: where in the plan in flight the sequences stand.
        """
        rows = _int64([s.row for s in sequences])
        ones, seq_lens = np.ones(len(sequences), np.int32), plan.rows.seq_lens[index] + 1
        return TargetPlan(
            step_id=plan.step_id + 1,
            rows=RowPlan(
                token_ids=np.zeros(len(sequences), np.int32),
                query_lens=ones,
                seq_lens=seq_lens,
                block_table=self._block_table(self._table.target_blocks, rows, int(seq_lens.max())),
            ),
            table_rows=rows.astype(np.int32),
            num_given=np.zeros(len(sequences), np.int32),
            num_sampled_rows=ones,
            sampling=self._target_sampling.build(rows, sequences),
            num_logprobs=None,
            wants_aux=np.zeros(len(sequences), np.bool_),
        )

    def draft_plan(
        self,
        batch: StepBatch,
        target: TargetPlan,
        index: list[int],
        aux: AuxHandle,
        *,
        in_table: bool,
        knows_all: bool = False,
    ) -> DraftPlan:
        """The draft step behind a verify: extend over its rows, then propose. It may be planned before the verify is
        done, where no draw depends on the tokens before it.

        A sequence's draft KV must reach as far as its target KV, or will when the draft step in flight is settled.

        Args:
            index: which of the batch's sequences use the draft.
            in_table: see `DraftPlan.in_table`.
            knows_all: whether what the verify drew counts already: who follows a match will look up again. Before, a
                match may end with the verify, and the single-row steps rest only where they do for all.
        """
        sequences = [batch.sequences[i] for i in index]
        rows = _int64([s.row for s in sequences])
        query_lens, lengths = target.rows.query_lens[index], target.rows.seq_lens[index]
        num_drawn = target.num_sampled_rows[index]
        seq_lens = lengths - np.array([s.draft_start for s in sequences], np.int32)
        # As if the verify accepted nothing: a sequence that samples emits one token.
        unaccepted = lengths - np.maximum(num_drawn - 1, 0)
        room = np.array([s.max_num_tokens for s in sequences], np.int32) - unaccepted - 2
        chosen = np.array([s.speculation.num_chosen_tokens for s in sequences], np.int32)
        follows = np.array([s.follows_a_match for s in sequences], np.bool_)
        if knows_all or follows.all():
            chosen = np.where(follows, np.minimum(chosen, 1), chosen)  # what the extension gives, in no further step
        most = np.where(num_drawn > 0, np.clip(chosen, 0, np.maximum(room, 0)), 0).astype(np.int32)
        proposing = [s for s, count in zip(sequences, most.tolist(), strict=True) if count]
        last_steps = np.maximum(np.minimum(most, room - (lengths - unaccepted)) - 1, 0)
        first_rows = np.cumsum(target.rows.query_lens, dtype=np.int64) - target.rows.query_lens
        return DraftPlan(
            step_id=target.step_id,
            rows=RowPlan(
                token_ids=_tokens_behind(sequences, lengths - query_lens, query_lens),
                query_lens=query_lens,
                seq_lens=seq_lens,
                block_table=self._block_table(self._table.draft_blocks, rows, int((seq_lens + last_steps).max())),
            ),
            table_rows=rows.astype(np.int32),
            num_drawn=num_drawn,
            aux=aux,
            aux_rows=_ragged_ranges(first_rows[index], query_lens),
            num_proposals=most,
            room=room,
            sampling=self._draft_sampling.build(rows[most > 0], proposing),
            output_index=unaccepted[most > 0].astype(np.int64) + 1,
            in_table=in_table,
        )

    def _block_table(self, blocks: Int32Array, rows: Int64Array, num_slots: int) -> Int32Array:
        return blocks[rows, : -(-num_slots // self._block_size)]

    def _masks(
        self, sequences: list[Sequence], num_sampled: Int32Array
    ) -> tuple[Int32Array, Int32Array] | tuple[None, None]:
        """[M, words] masks and [M] the sampled rows that they are of: those that may not draw every token."""
        masks: dict[int, Int32Array] = {}
        forced = self._forced_rows(sequences, num_sampled)
        first_rows = (np.cumsum(num_sampled) - num_sampled).tolist()
        for first, sequence, count in zip(first_rows, sequences, num_sampled.tolist(), strict=True):
            allowed = sequence.allowed_mask(self._mask_words) if sequence.params.allowed_token_ids else None
            grammar = sequence.grammar_masks(count) if sequence.grammar is not None else [None] * count
            for row, mask in enumerate(grammar, first):
                if row in forced:
                    masks[row] = token_mask([forced[row]], self._mask_words)
                elif mask is not None:
                    masks[row] = mask if allowed is None else mask & allowed
                elif allowed is not None:
                    masks[row] = allowed
        if not masks:
            return None, None
        return np.stack(list(masks.values())), np.array(list(masks), np.int32)

    def _forced_rows(self, sequences: list[Sequence], num_sampled: Int32Array) -> dict[int, int]:
        """Sampled row -> the one token that it must draw, where a sequence's budget of thoughts is used up."""
        forced = {}
        first_rows = (np.cumsum(num_sampled) - num_sampled).tolist()
        for first, sequence, count in zip(first_rows, sequences, num_sampled.tolist(), strict=True):
            budget = sequence.params.thinking_budget
            if budget is not None:
                row = sequence.forced_row(self._table.pending_token_ids[sequence.row, 1:count])
                if row is not None:
                    forced[first + row] = budget.end_token_id
        return forced


def store_proposals(
    table: BatchTable,
    sequences: list[Sequence],
    plan: DraftPlan,
    num_proposals: Int32Array,
    reply: DraftReply,
    vocab_size: int,
) -> None:
    """Keep the draft's tokens for the next verify, or that they stand in the token table.

    Args:
        sequences: [S] those of the plan; those that use no draft any more are left as they are.
        num_proposals: [S] how many there are.

    Raises:
        ValueError: a proposal is no token of the target's vocabulary; nothing has changed then.
    """
    rows = _int64([s.row for s in sequences])
    if reply.draft_token_ids is not None:
        _check_wanted(reply.draft_token_ids, plan, num_proposals, reply, vocab_size)
        proposing = rows[plan.num_proposals > 0]
        table.pending_token_ids[proposing, 1 : 1 + reply.draft_token_ids.shape[1]] = reply.draft_token_ids
    for sequence, count in zip(sequences, num_proposals.tolist(), strict=True):
        if sequence.uses_draft:
            sequence.num_draft_tokens, sequence.draft_origin = count, TokenOrigin.DRAFT
            table.is_in_table[sequence.row] = reply.draft_token_ids is None


def _check_wanted(
    proposals: Int64Array, plan: DraftPlan, num_proposals: Int32Array, reply: DraftReply, vocab_size: int
) -> None:
    """Nobody looks at what is behind a sequence's last proposal, or at those of a sequence that failed."""
    if not proposals.size or (proposals.min() >= 0 and proposals.max() < vocab_size):
        return
    is_proposing = plan.num_proposals > 0
    is_wanted = np.arange(proposals.shape[1]) < num_proposals[is_proposing][:, None]
    is_wanted &= reply.seq_status[is_proposing][:, None] == 0
    wrong = proposals[is_wanted & ((proposals < 0) | (proposals >= vocab_size))]
    if wrong.size:
        raise ValueError(f"the draft proposed token {wrong[0]}, 0 to {vocab_size - 1} is allowed")


def emitted_tokens(reply: TargetReply) -> list[list[int]]:
    """[B] accepted draft tokens and the target's own token of each sampling sequence."""
    counts = (reply.num_accepted_tokens + 1).tolist()
    return [ids[:count] for ids, count in zip(reply.output_token_ids.tolist(), counts, strict=True)]


def drawn_by_sequence(plan: TargetPlan, reply: TargetReply) -> tuple[Int64Array, Int32Array]:
    """[S, W + 1] tokens and [S] accepted draft tokens, of sequences that do not sample any and 0."""
    is_sampling = plan.num_sampled_rows > 0
    drawn = np.zeros((len(is_sampling), reply.output_token_ids.shape[1]), np.int64)
    accepted = np.zeros(len(is_sampling), np.int32)
    drawn[is_sampling], accepted[is_sampling] = reply.output_token_ids, reply.num_accepted_tokens
    return drawn, accepted


def _tokens_behind(sequences: list[Sequence], starts: Int32Array, counts: Int32Array) -> Int32Array:
    """[T] the token one position later than each row, 0 where it is not known yet."""
    parts = []
    for sequence, start, count in zip(sequences, starts.tolist(), counts.tolist(), strict=True):
        known = sequence.token_ids[start + 1 : start + 1 + count]
        parts.append(known if len(known) == count else np.append(known, np.zeros(count - len(known), np.int32)))
    return np.concatenate(parts)


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
