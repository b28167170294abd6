"""Makes what attention needs of a step's rows, with tensor operations only: no loop over sequences, no device sync."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from kimi_backend.runners.row_arrays import slots_of
from kimi_backend.types.plan import Int32Array
from kimi_kernels.attention_batch import AttentionBatch, AttentionMetadata
from kimi_kernels.kernel_set import KernelSet

MAX_DECODE_QUERY_LEN = 8
"""A verify has at most so many rows a sequence; longer ones are prefill chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataBuilder:
    """Builds the metadata of one model's steps."""

    kernels: KernelSet
    block_size: int
    num_mla_heads: int | None
    """Heads of this rank that a decode plan is made for; None for a model without MLA, whose attention takes rows of
    any query length in one batch."""
    split_tokens: int = 0
    """See `kimi_kernels.mla_decode.op.PlanMlaDecode`."""

    def build(
        self,
        query_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        host_query_lens: Int32Array,
        host_seq_lens: Int32Array,
    ) -> AttentionMetadata:
        """Metadata of a ragged step.

        Leading sequences of at most MAX_DECODE_QUERY_LEN rows are decode, all from the first longer one on are
        prefill; either kernel is right for any length, so a plan's order costs at most time.

        Args:
            query_lens, seq_lens: [S] int32, of the plan, on the device.
            block_table: [S, max_blocks] int32, on the device.
            host_query_lens, host_seq_lens: [S], the same on the host.
        """
        if query_lens.device.type == "cpu":
            positions, slots = self._rows_on_host(host_query_lens, host_seq_lens, block_table)
        else:
            positions, slots = self._rows_on_device(query_lens, seq_lens, block_table, int(host_query_lens.sum()))
        split = self._num_decode_sequences(host_query_lens)
        parts = [
            self._batch(query_lens[part], seq_lens[part], block_table[part], host_query_lens[part], host_seq_lens[part])
            for part in (slice(0, split), slice(split, None))
        ]
        return AttentionMetadata(
            positions=positions, slot_mapping=slots, decode=self.planned(parts[0]), prefill=parts[1]
        )

    def _rows_on_device(
        self, query_lens: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(positions, slots) of all rows, [T] int64 each."""
        sequences = torch.arange(len(query_lens), device=query_lens.device)
        sequence_of_row = torch.repeat_interleave(sequences, query_lens, output_size=num_tokens)
        rows = torch.arange(num_tokens, device=query_lens.device)
        first_positions = (seq_lens - query_lens - _prefix_sum(query_lens)[:-1]).long()
        positions = first_positions[sequence_of_row] + rows
        blocks = block_table[sequence_of_row, positions // self.block_size].long()
        return positions, blocks * self.block_size + positions % self.block_size

    def _rows_on_host(
        self, query_lens: Int32Array, seq_lens: Int32Array, block_table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in numpy: a dozen tensor operations on a few numbers cost a tenth of a millisecond there."""
        ends = np.cumsum(query_lens, dtype=np.int64)
        sequence = np.repeat(np.arange(len(ends)), query_lens)
        positions = np.arange(len(sequence)) + (seq_lens - ends)[sequence]
        slots = slots_of(block_table.numpy(), sequence, positions, self.block_size)
        return torch.from_numpy(positions), torch.from_numpy(slots)

    def build_single_rows(
        self, seq_lens: torch.Tensor, block_table: torch.Tensor, writes: torch.Tensor | None, max_seq_len: int
    ) -> AttentionMetadata:
        """Metadata of a step of one row a sequence, whose lengths only the device knows.

        Args:
            seq_lens: [B] int32, including the row.
            block_table: [B, max_blocks] int32.
            writes: [B] bool; where false the row stores nothing. None: all store.
            max_seq_len: upper bound of seq_lens.
        """
        positions = seq_lens.long() - 1
        if positions.device.type == "cpu":
            slots = torch.from_numpy(
                slots_of(block_table.numpy(), np.arange(len(positions)), positions.numpy(), self.block_size)
            )
        else:
            blocks = block_table.gather(1, (positions // self.block_size)[:, None])[:, 0].long()
            slots = blocks * self.block_size + positions % self.block_size
        batch = AttentionBatch(
            cu_seqlens_q=torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device),
            seq_lens=seq_lens,
            block_table=block_table,
            num_tokens=len(seq_lens),
            max_query_len=1,
            max_seq_len=max_seq_len,
        )
        return AttentionMetadata(
            positions=positions,
            slot_mapping=slots if writes is None else slots.masked_fill(~writes, -1),
            decode=self.planned(batch),
            prefill=None,
        )

    def _num_decode_sequences(self, host_query_lens: Int32Array) -> int:
        is_long = host_query_lens > MAX_DECODE_QUERY_LEN
        if self.kernels.absorb_prefill or self.num_mla_heads is None or not is_long.any():
            return len(host_query_lens)
        return int(is_long.argmax())

    def _batch(
        self,
        query_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        host_query_lens: Int32Array,
        host_seq_lens: Int32Array,
    ) -> AttentionBatch | None:
        if not len(host_query_lens):
            return None
        return AttentionBatch(
            cu_seqlens_q=_prefix_sum(query_lens),
            seq_lens=seq_lens,
            block_table=block_table,
            num_tokens=int(host_query_lens.sum()),
            max_query_len=int(host_query_lens.max()),
            max_seq_len=int(host_seq_lens.max()),
        )

    def planned(self, batch: AttentionBatch | None) -> AttentionBatch | None:
        """The batch with a decode plan, where the model's attention has one."""
        if batch is None or self.num_mla_heads is None:
            return batch
        plan = self.kernels.plan_mla_decode(batch, self.num_mla_heads, self.block_size, self.split_tokens)
        return batch if plan is None else replace(batch, decode_plan=plan)


def _prefix_sum(lengths: torch.Tensor) -> torch.Tensor:
    """[S] int32 -> [S + 1] int32, from 0."""
    if lengths.device.type == "cpu":
        starts = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths.numpy(), out=starts[1:])
        return torch.from_numpy(starts)
    sums = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=sums[1:])
    return sums
