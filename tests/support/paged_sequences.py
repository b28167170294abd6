"""Sequences over a paged cache, laid out to be hard on whoever reads it: shuffled blocks, NaN in slots nobody wrote,
huge ids in unused block-table entries."""

import numpy as np
import torch

from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_backend.types.plan import Int32Array, RowPlan
from kimi_kernels.attention_batch import AttentionMetadata
from kimi_kernels.kernel_set import KernelSet

CPU = torch.device("cpu")
UNUSED_BLOCK_ID = 2**30


class PagedSequences:
    """Lengths and block tables of a few sequences of one pool."""

    def __init__(
        self, capacities: list[int], *, block_size: int = 16, seed: int = 0, device: torch.device = CPU
    ) -> None:
        """capacities: tokens that each sequence may grow to."""
        self.device = device
        self.block_size = block_size
        counts = [-(-capacity // block_size) for capacity in capacities]
        self.num_blocks = sum(counts) + 2
        block_ids = np.random.default_rng(seed).permutation(self.num_blocks).astype(np.int32)
        self.block_table: Int32Array = np.full((len(counts), max(counts) + 1), UNUSED_BLOCK_ID, np.int32)
        for sequence, count in enumerate(counts):
            start = sum(counts[:sequence])
            self.block_table[sequence, :count] = block_ids[start : start + count]
        self.lengths: Int32Array = np.zeros(len(counts), np.int32)

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=self.device)

    def rows(self, chunks: list[tuple[int, list[int]]]) -> RowPlan:
        """Append each chunk's tokens to its sequence; a sequence may stand in one chunk only."""
        sequences = [sequence for sequence, _ in chunks]
        query_lens = np.array([len(tokens) for _, tokens in chunks], np.int32)
        self.lengths[sequences] += query_lens
        return RowPlan(
            token_ids=np.concatenate([np.array(tokens, np.int32) for _, tokens in chunks]),
            query_lens=query_lens,
            seq_lens=self.lengths[sequences].copy(),
            block_table=self.block_table[sequences].copy(),
        )

    def metadata(self, rows: RowPlan, kernels: KernelSet, num_mla_heads: int | None) -> AttentionMetadata:
        builder = MetadataBuilder(kernels=kernels, block_size=self.block_size, num_mla_heads=num_mla_heads)
        return builder.build(
            torch.from_numpy(rows.query_lens).to(self.device),
            torch.from_numpy(rows.seq_lens).to(self.device),
            torch.from_numpy(rows.block_table).to(self.device),
            rows.query_lens,
            rows.seq_lens,
        )
