"""The block tables of captured steps: one of sequences, one of parts of chunks."""

from collections.abc import Iterable

import torch

from kimi_backend.runners.graphs.buckets import Bucket
from kimi_backend.runners.graphs.chunk_parts import ChunkParts
from kimi_backend.runners.graphs.static_arrays import StaticBlockTable
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.types.plan import Int32Array, RowPlan


class StaticTables:
    """A table for each kind of bucket, so that a prompt leaves the one of decode steps as it is."""

    def __init__(self, buckets: Iterable[Bucket], limits: RunnerLimits, pool: KvPool) -> None:
        self._block_size, device = pool.block_size, pool.tensor.device
        num_columns = self._num_blocks(limits.max_model_len)
        most_parts = max((bucket.num_parts for bucket in buckets if bucket.cuts_chunks), default=0)
        self._of_sequences = StaticBlockTable(limits.max_num_seqs, num_columns, device)
        self._of_parts = StaticBlockTable(most_parts, num_columns, device)

    def of(self, bucket: Bucket) -> torch.Tensor:
        """[parts, columns] the rows that a bucket's attention reads."""
        table = self._of_parts if bucket.cuts_chunks else self._of_sequences
        return table.tensor[: bucket.num_parts]

    def upload(self, table: Int32Array, longest: int) -> None:
        """Queue the copy of sequences' rows. longest: tokens of the longest sequence, as far as a step reads them."""
        self._of_sequences.upload(table, self._num_blocks(longest))

    def upload_parts(self, rows: RowPlan, parts: ChunkParts) -> None:
        """Queue the copy of a row for each part."""
        self._of_parts.upload(rows.block_table[parts.sequence], self._num_blocks(int(rows.seq_lens.max())))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
