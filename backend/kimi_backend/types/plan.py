"""The values that cross the border between the engine and a model runner in one step: frozen, of numpy arrays.

Runners are stateless about sequences: with the token table (`kimi_kernels.token_table`) a plan carries all that a step
needs, so a step can be replayed, tested and measured alone. S sequences and T rows (tokens) ride in a step; B of the
sequences sample (in the order they stand in the plan); W is the most draft tokens any of them verifies or proposes.
"CSR" as in `kimi_kernels.sampling_inputs`, whose field meanings hold here too: a runner turns each array into a tensor
of the same name.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kimi_backend.types.scoring import ScoringPlan, TokenScores

PROTOCOL_VERSION = 1
PLACEHOLDER_TOKEN_ID = -1
STATUS_NOT_FINITE, STATUS_NO_TOKEN_LEFT = 1, 2
"""The statuses of `kimi_kernels.sampling_inputs`."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """Sampling parameters of the B sampling sequences; see `kimi_kernels.sampling_inputs.SamplingInputs`."""

    packed_whole: ClassVar[bool] = True
    is_kept: ClassVar[bool] = True
    """See `types.codec`."""

    temperature: FloatArray
    top_k: Int32Array
    top_p: FloatArray
    min_p: FloatArray
    seed: Int64Array
    repetition_penalty: FloatArray
    frequency_penalty: FloatArray
    presence_penalty: FloatArray
    penalty_offsets: Int32Array
    penalty_ids: Int32Array
    penalty_counts: Int32Array
    penalty_in_prompt: BoolArray
    bias_offsets: Int32Array
    bias_ids: Int32Array
    bias_values: FloatArray
    ban_offsets: Int32Array
    ban_ids: Int32Array
    ban_until: Int64Array
    bad_word_offsets: Int32Array
    bad_word_token_offsets: Int32Array
    bad_word_tokens: Int32Array
    history_tail: Int32Array

    @classmethod
    def plain(cls, count: int, **fields: Any) -> "SamplingPlan":
        """Greedy, seed 0 and nothing else set, for `count` sequences.

        Args:
            fields: replace arrays; a scalar stands for every sequence.
        """
        offsets, ids = np.zeros(count + 1, np.int32), np.empty(0, np.int32)
        zeros, ones = np.zeros(count, np.float32), np.ones(count, np.float32)
        arrays: dict[str, npt.NDArray[Any]] = {
            "temperature": zeros,
            "top_k": np.zeros(count, np.int32),
            "top_p": ones,
            "min_p": zeros,
            "seed": np.zeros(count, np.int64),
            "repetition_penalty": ones,
            "frequency_penalty": zeros,
            "presence_penalty": zeros,
            "penalty_offsets": offsets,
            "penalty_ids": ids,
            "penalty_counts": ids,
            "penalty_in_prompt": np.empty(0, np.bool_),
            "bias_offsets": offsets,
            "bias_ids": ids,
            "bias_values": np.empty(0, np.float32),
            "ban_offsets": offsets,
            "ban_ids": ids,
            "ban_until": np.empty(0, np.int64),
            "bad_word_offsets": offsets,
            "bad_word_token_offsets": np.zeros(1, np.int32),
            "bad_word_tokens": ids,
            "history_tail": np.full((count, 1), PLACEHOLDER_TOKEN_ID, np.int32),
        }
        for name, value in fields.items():
            arrays[name] = np.full(count, value, arrays[name].dtype) if np.isscalar(value) else value
        return cls(**arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """The ragged batch of one step: which tokens, at which positions, over which blocks."""

    token_ids: Int32Array
    """[T] token embedded in each row."""
    query_lens: Int32Array
    """[S] rows of each sequence, at least 1."""
    seq_lens: Int32Array
    """[S] KV length including this step's rows: row i of q stands at position seq_len - q + i."""
    block_table: Int32Array
    """[S, max_blocks] block ids in order; entries past a sequence's last block may hold anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """Verify rows and prefill chunks for the target.

    A decoding sequence brings 1 + num_draft_tokens rows and samples each; the last chunk of a prefill samples its last
    row; a middle chunk samples none.
    """

    step_id: int
    """More than that of any step before it."""
    rows: RowPlan
    table_rows: Int32Array
    """[S] row of each sequence in the token table."""
    num_given: Int32Array
    """[S] how many of a sequence's rows, from the first on, have their token in `rows.token_ids`. The others, of which
    any valid token stands there, take it from the table: the first sampled row the last token that the target drew,
    the rows behind it what the draft proposed."""
    num_sampled_rows: Int32Array
    """[S] how many of the sequence's last rows draw a token: 0, or 1 + its draft tokens under verification."""
    sampling: SamplingPlan
    num_logprobs: int | None
    """Most top logprobs that any sequence wants; None when none wants logprobs."""
    wants_aux: BoolArray
    """[S] whether the draft will read this sequence's aux hidden states."""
    logit_mask: Int32Array | None = None
    """[M, ceil(vocab_size / 32)] what M of the sampled rows may draw, see `SamplingRows.logit_mask`; None where all may
    draw all."""
    masked_rows: Int32Array | None = None
    """[M] which of the sampled rows those are, rising; there where `logit_mask` is."""
    draft_step: int = 0
    """`step_id` of the draft step that this one comes after, and whose proposals it reads; 0 where there is none."""
    scoring: ScoringPlan | None = None
    """Rows that score a prompt's tokens; None where there are none."""

    @classmethod
    def given(cls, rows: RowPlan, **fields: Any) -> "TargetPlan":
        """A step of which the plan has all tokens, with a row of the token table for each sequence in turn."""
        table_rows = np.arange(len(rows.query_lens), dtype=np.int32)
        return cls(rows=rows, table_rows=table_rows, num_given=rows.query_lens, **fields)

    @property
    def reads_table(self) -> bool:
        """True if some row's token is not in the plan."""
        return bool((self.num_given < self.rows.query_lens).any())


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxHandle:
    """Aux hidden states of a target step, on the way to the draft.

    In one process `tensor` holds them, [T, num_aux * hidden_size]. Across processes either a BLS tensor carries them,
    or `region` names the part of the shared buffer that the target wrote.
    """

    tensor: Any | None = None
    region: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReply:
    """The tokens that the target drew and accepted."""

    step_id: int
    runner_epoch: int
    seq_status: Int32Array
    """[S] 0, or why the sequence failed alone (`kimi_kernels.sampling_inputs.STATUS_*`)."""
    output_token_ids: Int64Array
    """[B, W + 1] accepted draft tokens, the target's own token, then PLACEHOLDER_TOKEN_ID."""
    num_accepted_tokens: Int32Array
    """[B] accepted draft tokens; the target's own token is not counted."""
    aux: AuxHandle
    logprobs: FloatArray | None = None
    """[B, W + 1], beside output_token_ids."""
    top_logprob_ids: Int64Array | None = None
    """[B, W + 1, num_logprobs]."""
    top_logprobs: FloatArray | None = None
    draft_status: Int32Array | None = None
    """[S] what the plan's `draft_step` says of each sequence; None without one."""
    scores: TokenScores | None = None
    """The scores of the tokens in the plan's `scoring`; None without one."""
    runner_us: int = 0
    """Microseconds that the runner took, where a process border lies between; 0 in the same process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """Rows for the draft to extend over, then how many tokens to propose.

    Row p pairs the target's aux hidden state at position p with the token at p + 1, stands at RoPE position p, writes
    draft slot p and predicts the token at p + 2.

    A plan may be made before the verify that it comes after is done. It has all rows of the verify then: with a of a
    sequence's draft tokens accepted, its last `num_drawn - 1 - a` rows write slots that the next extension overwrites.
    """

    step_id: int
    """The step of the verify that this step comes after."""
    rows: RowPlan
    """token_ids are the tokens one position later than the rows; seq_lens are draft lengths after the extension, as if
    everything were accepted."""
    table_rows: Int32Array
    """[S] row of each sequence in the token table."""
    num_drawn: Int32Array
    """[S] how many of a sequence's rows, from the last one back, embed what the verify drew; any valid token stands in
    `rows.token_ids` there. 0 where the plan has all tokens."""
    aux: AuxHandle
    aux_rows: Int64Array
    """[T] row of the target step's aux hidden states that each draft row reads."""
    num_proposals: Int32Array
    """[S] draft tokens wanted, as if nothing were accepted: 0 only extends. The block table covers the slots of all
    single-row steps."""
    room: Int32Array
    """[S] with a accepted, at most room - a tokens are proposed."""
    sampling: SamplingPlan
    """The B sequences that propose; its CSRs and tails include every token up to the last extended row's."""
    output_index: Int64Array
    """[B] index of the first token to be proposed, if nothing is accepted (the last valid row's position + 2)."""
    in_table: bool = False
    """True if proposals and status are left in the token table, and the reply has none."""

    @classmethod
    def given(cls, rows: RowPlan, num_proposals: Int32Array, **fields: Any) -> "DraftPlan":
        """A step of which the plan has all tokens, with a row of the token table for each sequence in turn."""
        count = len(rows.query_lens)
        return cls(
            rows=rows,
            table_rows=np.arange(count, dtype=np.int32),
            num_drawn=np.zeros(count, np.int32),
            num_proposals=num_proposals,
            room=num_proposals,
            **fields,
        )

    @property
    def num_wanted(self) -> Int32Array:
        """[S] draft tokens wanted of a plan that knows what was accepted (`resolved`)."""
        wanted: Int32Array = np.maximum(np.minimum(self.num_proposals, self.room), 0)
        return wanted

    def resolved(self, drawn: Int32Array | Int64Array, num_accepted: Int32Array) -> "DraftPlan":
        """The same step with what the verify drew put in: rows behind the last accepted one are gone.

        Args:
            drawn: [S, at least the most of num_drawn] tokens. num_accepted: [S] draft tokens accepted.
        """
        if not self.num_drawn.any():
            return self
        query_lens = self.rows.query_lens
        rejected = np.maximum(self.num_drawn - 1, 0)
        accepted = np.clip(num_accepted, 0, rejected)
        rejected -= accepted
        ends = np.cumsum(query_lens)
        sequence = np.repeat(np.arange(len(ends)), query_lens)
        from_end = ends[sequence] - np.arange(len(sequence))
        place = self.num_drawn[sequence] - from_end
        token_ids = np.where(place >= 0, drawn[sequence, np.maximum(place, 0)], self.rows.token_ids)
        is_kept = from_end > rejected[sequence]
        return replace(
            self,
            rows=replace(
                self.rows,
                token_ids=token_ids[is_kept].astype(np.int32),
                query_lens=query_lens - rejected,
                seq_lens=self.rows.seq_lens - rejected,
            ),
            num_drawn=np.zeros_like(self.num_drawn),
            aux_rows=self.aux_rows[is_kept],
            room=self.room - accepted,
            output_index=self.output_index + accepted[self.num_proposals > 0],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftReply:
    """The tokens that the draft proposes."""

    step_id: int
    runner_epoch: int
    seq_status: Int32Array
    """[S]"""
    draft_token_ids: Int64Array | None
    """[B, W] target ids, PLACEHOLDER_TOKEN_ID where none is wanted. None where the token table has them: `seq_status`
    says nothing then, and the verify that reads the table brings it."""
    runner_us: int = 0
    """The field of `TargetReply`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerDescription:
    """A runner's answer to the handshake; a pair that does not fit is refused with both values."""

    role: str
    """"target" or "draft"."""
    runner_epoch: int
    """Random at start: a new one means that all KV is gone."""
    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    draft_vocab_size: int | None
    """Draft only: columns of its head."""
    aux_layer_ids: tuple[int, ...]
    """Resolved R(j): the residual stream entering layer j."""
    hidden_size: int
    """Width of one aux chunk."""
    kv_cache_dtype: str
    device: str
    """"cpu", or the GPU's UUID."""
    aux_buffer: bytes | None = None
    """CUDA IPC handle of the shared aux buffer, when there is one; of all ranks' buffers (`runners.ranks`)."""
    semaphores: bytes | None = None
    """The handle of the shared semaphores (`runners.hand_over.semaphores`) of a draft in a process of its own; of a
    target: of those that it has opened."""
    process_id: int | None = None
    """The process of a runner that has one of its own."""
    depth: int = 0
    """Steps that may be in flight, see `spec_decode.protocols`."""
    synthetic_parts: tuple[str, ...] = ()
    """The parts of this runner that are not real, such as its weights; benchmarks alone have any."""
    protocol_version: int = PROTOCOL_VERSION
