"""Steps of nobody: every kernel shape that prompts take, compiled before the first prompt comes."""

from dataclasses import replace

import numpy as np
import torch

from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.metadata_builder import MAX_DECODE_QUERY_LEN, MetadataBuilder
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_kernels.attention_batch import AttentionMetadata


def prefill_lengths(limits: RunnerLimits) -> list[int]:
    """Chunks whose kernels may differ, longest first: powers of two, and the longest there is."""
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    lengths = {longest}
    length = 2 * MAX_DECODE_QUERY_LEN
    while length < longest:
        lengths.add(length)
        length *= 2
    return sorted(lengths, reverse=True)


def idle_chunk(builder: MetadataBuilder, pool: KvPool, num_rows: int) -> tuple[torch.Tensor, AttentionMetadata]:
    """(token ids [num_rows], metadata) of one sequence's first chunk, which writes nothing."""
    device = pool.tensor.device
    lengths = np.array([num_rows], np.int32)
    device_lengths = torch.from_numpy(lengths).to(device)
    num_blocks = -(-num_rows // pool.block_size)
    # Any block will do, the same one twice too: what is read of it is not used.
    table = torch.arange(num_blocks, dtype=torch.int32, device=device).remainder(pool.num_blocks)[None]
    metadata = builder.build(device_lengths, device_lengths, table, lengths, lengths)
    nowhere = torch.full_like(metadata.slot_mapping, -1)
    return torch.zeros(num_rows, dtype=torch.int32, device=device), replace(metadata, slot_mapping=nowhere)
