"""Metadata against the definition, position by position."""

import dataclasses

import numpy as np
import pytest
import torch

from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_kernels.attention_batch import AttentionBatch, AttentionMetadata
from kimi_kernels.kernel_set import KernelSet

ABSORBED = KernelSet.plain()
SPLIT = dataclasses.replace(ABSORBED, absorb_prefill=False)
BLOCK_SIZE = 4
HUGE = 2**30


def build(query_lens: list[int], seq_lens: list[int], kernels: KernelSet, heads: int | None = 4) -> AttentionMetadata:
    q, lengths = np.array(query_lens, np.int32), np.array(seq_lens, np.int32)
    builder = MetadataBuilder(kernels=kernels, block_size=BLOCK_SIZE, num_mla_heads=heads)
    return builder.build(torch.from_numpy(q), torch.from_numpy(lengths), table(seq_lens), q, lengths)


def table(seq_lens: list[int]) -> torch.Tensor:
    """Scattered block ids past 65,535; entries that no sequence needs are huge."""
    blocks = torch.full((len(seq_lens), max(seq_lens) // BLOCK_SIZE + 2), HUGE, dtype=torch.int32)
    for index, length in enumerate(seq_lens):
        used = -(-length // BLOCK_SIZE)
        blocks[index, :used] = 70000 + 31 * torch.arange(used) % 97 + 100 * index
    return blocks


def rows_of(batch: AttentionBatch | None) -> list[int]:
    return [] if batch is None else batch.cu_seqlens_q.diff().tolist()


@pytest.mark.parametrize("kernels", [ABSORBED, SPLIT])
def test_positions_and_slots_of_every_row(kernels: KernelSet) -> None:
    query_lens, seq_lens = [1, 8, 9, 3, 20], [1, 30, 9, 17, 63]
    metadata = build(query_lens, seq_lens, kernels)
    blocks = table(seq_lens)
    expected = [
        (position, int(blocks[index, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE)
        for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(seq_len - query_len, seq_len)
    ]
    assert metadata.positions.tolist() == [position for position, _ in expected]
    assert metadata.slot_mapping.tolist() == [slot for _, slot in expected]
    assert metadata.slot_mapping.dtype == torch.int64


@pytest.mark.parametrize(
    ("query_lens", "num_decode"), [([1, 8, 3], 3), ([4, 9, 2], 1), ([9, 1], 0), ([1, 2, 64], 2), ([100], 0)]
)
def test_long_chunks_and_all_after_them_are_prefill(query_lens: list[int], num_decode: int) -> None:
    seq_lens = [length + 5 for length in query_lens]
    split, absorbed = build(query_lens, seq_lens, SPLIT), build(query_lens, seq_lens, ABSORBED)
    assert rows_of(split.decode) == query_lens[:num_decode]
    assert rows_of(split.prefill) == query_lens[num_decode:]
    assert (split.decode is None) == (num_decode == 0)
    assert (split.prefill is None) == (num_decode == len(query_lens))
    assert rows_of(absorbed.decode) == query_lens
    assert absorbed.prefill is None
    for batch, expected in ((split.decode, seq_lens[:num_decode]), (split.prefill, seq_lens[num_decode:])):
        if batch is not None:
            assert batch.seq_lens.tolist() == expected
            assert (batch.num_tokens, batch.max_seq_len) == (sum(rows_of(batch)), max(expected))
            assert batch.max_query_len == max(rows_of(batch))


def test_a_model_without_mla_takes_all_rows_in_one_batch() -> None:
    metadata = build([20, 1], [20, 7], SPLIT, heads=None)
    assert rows_of(metadata.decode) == [20, 1]
    assert metadata.prefill is None


def test_single_rows_write_only_where_told() -> None:
    seq_lens = [1, 6, 13]
    builder = MetadataBuilder(kernels=ABSORBED, block_size=BLOCK_SIZE, num_mla_heads=4)
    writes = torch.tensor([True, False, True])
    metadata = builder.build_single_rows(torch.tensor(seq_lens, dtype=torch.int32), table(seq_lens), writes, 16)
    whole = build([1, 1, 1], seq_lens, ABSORBED)
    assert metadata.positions.tolist() == [0, 5, 12]
    assert metadata.slot_mapping[writes].tolist() == whole.slot_mapping[writes].tolist()
    assert metadata.slot_mapping[1] == -1
    assert metadata.decode is not None and whole.decode is not None
    assert metadata.decode.cu_seqlens_q.tolist() == whole.decode.cu_seqlens_q.tolist()
    assert metadata.decode.seq_lens.tolist() == seq_lens


def test_rows_made_on_the_host_are_those_made_on_the_device() -> None:
    query_lens, seq_lens = np.array([1, 8, 3, 20], np.int32), np.array([9, 30, 3, 63], np.int32)
    blocks = table(seq_lens.tolist())
    builder = MetadataBuilder(kernels=SPLIT, block_size=BLOCK_SIZE, num_mla_heads=4)
    on_host = builder._rows_on_host(query_lens, seq_lens, blocks)
    on_device = builder._rows_on_device(torch.from_numpy(query_lens), torch.from_numpy(seq_lens), blocks, 32)
    assert [rows.tolist() for rows in on_host] == [rows.tolist() for rows in on_device]
    assert [rows.dtype for rows in on_host] == [rows.dtype for rows in on_device]
