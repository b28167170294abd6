"""What crosses the border between the engine and a model runner in one step: frozen values of numpy arrays.

Runners are stateless about sequences: a plan carries all a step needs, so a step can be replayed, tested and measured
alone. S sequences and T rows (tokens) ride in a step; B of the sequences sample (in the order they stand in the plan);
W is the most draft tokens any of them verifies or proposes. "CSR" as in `kimi_kernels.sampling_inputs`, whose field
meanings hold here too: a runner turns each array into a tensor of the same name.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

PROTOCOL_VERSION = 1
PLACEHOLDER_TOKEN_ID = -1
STATUS_NO_TOKEN_LEFT = 2
"""As in `kimi_kernels.sampling_inputs`."""

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
class TokenHandle:
    """Draft tokens that the device has or will have, for a target that reads them there (docs/decisions/0016).

    They lie in an int32 array [1 + longest proposal, at least num_seqs]: row 0 is what `DraftReply.seq_status` would
    say of each sequence of the draft's step, row 1 + j its draft token j, PLACEHOLDER_TOKEN_ID where there is none. A
    sequence of which anything failed has no token at all.
    """

    num_seqs: int = 0
    """Sequences of the draft's step; 0 where nothing is handed over."""
    tensor: Any | None = None
    """The array, in one process."""
    region: int | None = None
    """Across processes, the number that they have on the board of the two (`serving.step_board`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """Verify rows and prefill chunks for the target.

    A decoding sequence brings 1 + num_draft_tokens rows and samples each; the last chunk of a prefill samples its last
    row; a middle chunk samples none.
    """

    step_id: int
    rows: RowPlan
    num_sampled_rows: Int32Array
    """[S] how many of the sequence's last rows draw a token: 0, or 1 + its draft tokens under verification."""
    sampling: SamplingPlan
    num_logprobs: int | None
    """Most top logprobs that any sequence wants; None when none wants logprobs."""
    wants_aux: BoolArray
    """[S] whether the draft will read this sequence's aux hidden states."""
    logit_mask: Int32Array | None = None
    """[R, ceil(vocab_size / 32)] over all R sampled rows, see `SamplingRows.logit_mask`."""
    draft_tokens: TokenHandle = TokenHandle()
    """Where the draft tokens are that `rows.token_ids` does not have."""
    draft_columns: Int32Array | None = None
    """[S] column of `draft_tokens` that a sequence's draft tokens stand in, from row 1 on; `rows.token_ids` holds any
    valid token in their place. -1 where `rows.token_ids` has them, or there are none. None without a handle."""
    stamp: int = 0
    """Across processes, as what a draft that follows this verify finds it on the board (`serving.step_board`): more
    than any before it. 0 where none follows."""
    draft_step: int = 0
    """Across processes, the number on the board of the draft's last step before this one: it reads what this one will
    write. 0 where there is none."""
    drawn_rows: Int32Array | None = None
    """[S] for a step that is launched behind step_id - 1 before that is done: which of the tokens drawn there each
    sequence's one row embeds; `rows.token_ids` holds any valid token. None where `rows.token_ids` has them all."""


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
    """What the target drew and accepted."""

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
    """[num_seqs of the plan's draft_tokens] what they say of the draft's step; None without a handle."""
    launched_next: bool = False
    """Across processes: whether the step that was sent along was launched behind this one."""
    runner_us: int = 0
    """Microseconds that the runner took, where a process border lies between; 0 in the same process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnHandle:
    """What a verify has drawn or will have, on the device, for a draft that follows it; see `TargetReply`."""

    output_token_ids: Any | None = None
    """[at least B, at least W + 1] int64."""
    num_accepted_tokens: Any | None = None
    """[at least B] int32."""
    stamp: int = 0
    """Across processes, in place of the two: `TargetPlan.stamp` of the verify."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowPlan:
    """What a draft needs beside its plan to follow a verify before anybody knows how many tokens were accepted.

    The plan then has all rows of the verify: `rows.token_ids` hold nothing, `rows.seq_lens` and `output_index` are as
    if everything were accepted, `num_proposals` as if nothing were. With a accepted, a sequence is extended over a + 1
    rows; the rows after them write slots that the next extension overwrites.
    """

    packed_whole: ClassVar[bool] = True
    """See `types.codec`."""

    drawn: DrawnHandle = DrawnHandle()
    drawn_rows: Int32Array
    """[S] row of `drawn` of each sequence."""
    room: Int32Array
    """[S] of a sequence with a accepted, at most room - a tokens are proposed."""
    first_index: Int64Array
    """[S] index of the first token to be proposed, if none is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """Rows for the draft to extend over, then how many tokens to propose.

    Row p pairs the target's aux hidden state at position p with the token at p + 1, stands at RoPE position p, writes
    draft slot p and predicts the token at p + 2.
    """

    step_id: int
    rows: RowPlan
    """token_ids are the tokens one position later than the rows; seq_lens are draft lengths after the extension."""
    aux: AuxHandle
    aux_rows: Int64Array
    """[T] row of the target step's aux hidden states that each draft row reads."""
    num_proposals: Int32Array
    """[S] draft tokens wanted: 0 only extends. The block table covers slots up to seq_len + num_proposals - 1."""
    greedy: BoolArray
    """[B] propose the draft's argmax instead of its coupled sample."""
    sampling: SamplingPlan
    """Of the B sequences that propose; its CSRs and tails include every token up to the last extended row's."""
    output_index: Int64Array
    """[B] index of the first token to be proposed (the last extended row's position + 2)."""
    follow: FollowPlan | None = None
    """Of a draft that does not wait for the verify's results."""
    leaves_tokens: bool = False
    """Whether the draft may answer before its step is done, with a handle in place of ids and status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftReply:
    """What the draft proposes."""

    step_id: int
    runner_epoch: int
    seq_status: Int32Array
    """[S]"""
    draft_token_ids: Int64Array
    """[B, W] target ids, PLACEHOLDER_TOKEN_ID after each sequence's num_proposals; empty where `tokens` has them."""
    tokens: TokenHandle = TokenHandle()
    """If it has sequences: where the tokens will be. Then `seq_status` says nothing yet; the verify that reads the
    tokens brings it."""
    runner_us: int = 0
    """As in `TargetReply`."""


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
    step_board: bytes | None = None
    """Where a draft in a process of its own exchanges steps with its target (`serving.step_board`); of a target: the
    one that it has opened."""
    process_id: int | None = None
    """Of a runner in a process of its own."""
    queues_steps: bool = False
    """Target only: whether it takes a step while the one before it is running (`QueueingTarget`)."""
    pretences: tuple[str, ...] = ()
    """What is not real in this runner, such as its weights; only benchmarks have any (`ServingSettings.pretences`)."""
    protocol_version: int = PROTOCOL_VERSION
