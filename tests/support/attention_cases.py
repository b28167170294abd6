"""Batches of attention over a paged cache, laid out to be hard on an op: blocks shuffled over the pool, NaN in every
slot that no token owns, huge ids in block-table entries that no token needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kimi_kernels import AttentionBatch

UNUSED_BLOCK_ID = 2_147_480_000


@dataclass(frozen=True)
class PagedCase:
    """A batch and where its tokens lie."""

    batch: AttentionBatch
    slots: list[Tensor]
    """The slots of each sequence's tokens, [length] int64."""
    num_slots: int
    block_size: int

    def cache(self, contents: Sequence[Tensor]) -> Tensor:
        """A cache of the sequences' contents (each [length, ...]) and NaN elsewhere: [num_blocks, block_size, ...]."""
        width = contents[0].shape[1:]
        cache = torch.full((self.num_slots, *width), torch.nan, dtype=contents[0].dtype)
        for slots, content in zip(self.slots, contents, strict=True):
            cache[slots] = content
        return cache.view(-1, self.block_size, *width)

    def rows(self) -> list[tuple[int, int, int]]:
        """(row, sequence, number of keys it sees) of every query row, padding left out."""
        starts, lengths = self.batch.cu_seqlens_q.tolist(), self.batch.seq_lens.tolist()
        return [
            (row, sequence, max(0, length - (starts[sequence + 1] - 1 - row)))
            for sequence, length in enumerate(lengths)
            for row in range(starts[sequence], starts[sequence + 1])
        ]


def paged_case(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_size: int = 16, *, seed: int = 0, padding_rows: int = 0
) -> PagedCase:
    """Lay sequences out in a pool with a few blocks to spare."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator)
    table = torch.full((len(counts), max(counts, default=0) + 2), UNUSED_BLOCK_ID, dtype=torch.int32)
    slots, taken = [], 0
    for sequence, (count, length) in enumerate(zip(counts, seq_lens, strict=True)):
        block_ids = order[taken : taken + count]
        taken += count
        table[sequence, :count] = block_ids
        slots.append((block_ids[:, None] * block_size + torch.arange(block_size)).flatten()[:length])
    batch = AttentionBatch(
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32),
        block_table=table,
        num_tokens=sum(query_lens) + padding_rows,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
    )
    return PagedCase(batch, slots, num_blocks * block_size, block_size)


def with_a_key_to_spare(case: PagedCase) -> PagedCase:
    """The case with sequences one token shorter than what its cache holds: a row may see one key too many, which is a
    token of its own sequence and not NaN."""
    return replace(case, batch=see_more_keys(case.batch, -1))


def see_more_keys(batch: AttentionBatch, count: int) -> AttentionBatch:
    """Each row of each sequence sees so many keys more, or fewer: what a wrong causal bound in a kernel does."""
    return replace(batch, seq_lens=batch.seq_lens + count)


def random_contents(seq_lens: Sequence[int], *width: int, seed: int = 0) -> list[Tensor]:
    """[length, *width] of standard normal float32 for each sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, *width, generator=generator) for length in seq_lens]
