"""The reference's attention on a CPU: one query row at a time over exactly its own keys.

Shapes: T query rows, NP padded heads, D = L + R, N heads.
"""

import torch
from torch import Tensor

from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.paged_rows import read_slots, sequences_with_queries


def attend_rows(
    q: Tensor, latent_cache: Tensor, batch: AttentionBatch, kv_scale: float, out: Tensor, lse: Tensor | None
) -> None:
    """Write the rows that have keys; the others are left as they are.

    Args:
        q: [T, NP, D] float32, scaled, zero in padded heads. latent_cache: [num_blocks, block_size, D].
        out: [T, NP, L] float32. lse: [T, N] float32, natural log; None if not wanted.
    """
    block_size = latent_cache.shape[1]
    q_rows, out_rows = q.unbind(), out.unbind()
    for sequence, first, num_rows, length in sequences_with_queries(batch, block_size):
        block_ids = batch.block_table[sequence, : -(-length // block_size)]
        latents = read_slots(latent_cache, block_ids, kv_scale)
        keys_t, values = latents.t(), latents[:, : out.shape[2]]
        for row in range(first, first + num_rows):
            num_keys = length - (first + num_rows - 1 - row)
            if num_keys <= 0:
                continue
            scores = torch.mm(q_rows[row], keys_t[:, :num_keys])
            probs = scores.softmax(dim=-1, dtype=torch.float64).float()
            torch.mm(probs, values[:num_keys], out=out_rows[row])
            if lse is not None:
                lse[row] = log_sum_exp(scores[: lse.shape[1]])


def log_sum_exp(scores: Tensor) -> Tensor:
    """[N, n] -> [N], natural log of the sum of exponentials, in float64."""
    wide = scores.double()
    largest = wide.amax(dim=-1)
    return largest + (wide - largest.unsqueeze(-1)).exp().sum(dim=-1).log()
