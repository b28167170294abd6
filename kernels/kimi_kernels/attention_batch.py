"""Attention's view of one step: `AttentionBatch` for a kernel, `AttentionMetadata` for a model."""

from dataclasses import dataclass

import torch

from kimi_kernels.argument_checks import refuse, require_dtype, require_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """The split of a step's keys over the device; made once a step and reused by every layer.

    Opaque to callers: `KernelSet.plan_mla_decode` makes it, `KernelSet.mla_decode` reads it.
    """

    tensors: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Consecutive query tokens of several sequences over their paged KV.

    Sequence s owns query rows `cu_seqlens_q[s]` up to `cu_seqlens_q[s + 1]`. They are the last tokens of the
    `seq_lens[s]` tokens whose KV its blocks hold once this step's rows are stored: query row i of q rows sees
    keys 0 up to and including `seq_lens[s] - q + i`. A sequence may have no query rows, or length 0.
    """

    cu_seqlens_q: torch.Tensor
    """[num_seqs + 1] int32, prefix sum of the query rows, from 0."""
    seq_lens: torch.Tensor
    """[num_seqs] int32, length including this step's rows."""
    block_table: torch.Tensor
    """[num_seqs, max_blocks] int32, block ids in order. Entries past a sequence's last block may hold anything."""
    num_tokens: int
    """Query rows in the batch, padding included."""
    max_query_len: int
    """Upper bound of the query rows of one sequence (host value, may be larger than the truth)."""
    max_seq_len: int
    """Upper bound of `seq_lens` (host value, may be larger than the truth)."""
    decode_plan: DecodePlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """One step of a model: where each of its `num_tokens` rows stands, is stored, and what it attends to.

    Rows of `decode` come first, those of `prefill` after them. A kernel set that absorbs everything
    (`KernelSet.absorb_prefill`) gets all rows in `decode`.
    """

    positions: torch.Tensor
    """[num_tokens] int64, RoPE position of each row."""
    slot_mapping: torch.Tensor
    """[num_tokens] int64, cache row written by each token: `block_id * block_size + offset`; -1 writes nothing."""
    decode: AttentionBatch | None
    prefill: AttentionBatch | None

    @property
    def num_decode_tokens(self) -> int:
        return 0 if self.decode is None else self.decode.num_tokens


def check_block_table(batch: AttentionBatch) -> None:
    """Raise unless the block table is one row of int32 a sequence, columns contiguous."""
    table = batch.block_table
    if table.dim() != 2 or table.shape[0] != batch.seq_lens.shape[0]:
        require_shape("batch.block_table", table, batch.seq_lens.shape[0], None)
    require_dtype("batch.block_table", table, torch.int32)
    if table.stride(1) != 1:
        refuse("batch.block_table", f"column stride {table.stride(1)}", "1")
