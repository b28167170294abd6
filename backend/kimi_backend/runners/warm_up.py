"""Dummy prefill batches for warm-up: every kernel shape that prompts take is compiled before the first prompt comes."""

from dataclasses import replace

import numpy as np
import torch

from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.metadata_builder import MAX_DECODE_QUERY_LEN, MetadataBuilder
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_kernels.attention_batch import AttentionMetadata


def prefill_lengths(limits: RunnerLimits) -> list[int]:
    """Rows of steps whose kernels may differ, most first: powers of two, and the most there are."""
    longest = limits.max_num_batched_tokens
    lengths = {longest}
    length = 2 * MAX_DECODE_QUERY_LEN
    while length < longest:
        lengths.add(length)
        length *= 2
    return sorted(lengths, reverse=True)


def idle_chunk(
    builder: MetadataBuilder, pool: KvPool, num_rows: int, max_model_len: int
) -> tuple[torch.Tensor, AttentionMetadata]:
    """(token ids [num_rows], metadata) of first chunks that write nothing, of as many sequences as the rows need."""
    device = pool.tensor.device
    num_seqs = -(-num_rows // max_model_len)
    lengths = np.full(num_seqs, num_rows // num_seqs, np.int32)
    lengths[: num_rows % num_seqs] += 1
    device_lengths = torch.from_numpy(lengths).to(device)
    num_blocks = -(-int(lengths.max()) // pool.block_size)
    # Any block will do, the same one twice too: what is read of it is not used.
    table = torch.arange(num_blocks, dtype=torch.int32, device=device).remainder(pool.num_blocks).repeat(num_seqs, 1)
    metadata = builder.build(device_lengths, device_lengths, table, lengths, lengths)
    nowhere = torch.full_like(metadata.slot_mapping, -1)
    return torch.zeros(num_rows, dtype=torch.int32, device=device), replace(metadata, slot_mapping=nowhere)
