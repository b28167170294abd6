"""Steps of nobody: as many rows as a step may have, though no sequence is that long."""

import pytest
import torch

from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.warm_up import idle_chunk, prefill_lengths
from kimi_kernels.kernel_set import KernelSet

BUILDER = MetadataBuilder(kernels=KernelSet.plain(), block_size=16, num_mla_heads=4)
POOL = KvPool(tensor=torch.zeros(1, 3, 16, 8))


def test_the_most_rows_of_a_step_are_warmed_whatever_a_sequence_may_hold() -> None:
    limits = RunnerLimits(max_num_batched_tokens=100, max_num_seqs=4, max_model_len=40)
    assert prefill_lengths(limits) == [100, 64, 32, 16]


@pytest.mark.parametrize("num_rows", [16, 40, 41, 100])
def test_its_sequences_fit_and_write_nothing(num_rows: int) -> None:
    token_ids, metadata = idle_chunk(BUILDER, POOL, num_rows, max_model_len=40)
    assert token_ids.shape == metadata.positions.shape == (num_rows,)
    assert int(metadata.positions.max()) < 40
    assert bool((metadata.slot_mapping == -1).all())
    assert metadata.decode is not None
    assert int(metadata.decode.seq_lens.sum()) == num_rows
    assert int(metadata.decode.block_table.max()) < POOL.num_blocks
