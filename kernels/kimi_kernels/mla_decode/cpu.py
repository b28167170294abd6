"""Absorbed MLA attention in float32: one query row at a time over exactly its own keys.

Shapes: N heads, D = L + R, n keys of the row. The shapes that the BLAS sees depend on N, D and n only.
"""

import torch
from torch import Tensor

from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.mla_decode import reference
from kimi_kernels.paged_rows import read_slots, sequences_with_queries
from kimi_kernels.row_products import aligned, keeps_rows_aligned


def mla_decode(
    q: Tensor,
    latent_cache: Tensor,
    batch: AttentionBatch,
    kv_lora_rank: int,
    softmax_scale: float,
    kv_scale: float = 1.0,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`signatures.MlaDecode`.

    Raises:
        ValueError: q and latent_cache differ in width, or the batch does not fit them.
    """
    num_tokens, num_heads, latent_dim = q.shape
    fits = latent_cache.shape[2:] == (latent_dim,) and num_tokens == batch.num_tokens and kv_lora_rank <= latent_dim
    is_aligned = keeps_rows_aligned(num_heads * latent_dim, num_heads * kv_lora_rank)
    if not fits or not is_aligned or q.dtype != torch.float32 or return_lse:
        return reference.mla_decode(q, latent_cache, batch, kv_lora_rank, softmax_scale, kv_scale, return_lse)
    block_size = latent_cache.shape[1]
    out = torch.zeros(num_tokens, num_heads, kv_lora_rank)
    q_rows, out_rows = aligned(q * softmax_scale).unbind(), out.unbind()
    for sequence, first, num_rows, length in sequences_with_queries(batch, block_size):
        block_ids = batch.block_table[sequence, : -(-length // block_size)]
        latents = read_slots(latent_cache, block_ids, kv_scale)
        keys_t, values = latents.t(), latents[:, :kv_lora_rank]
        for row in range(first, first + num_rows):
            num_keys = length - (first + num_rows - 1 - row)
            if num_keys > 0:
                probs = torch.mm(q_rows[row], keys_t[:, :num_keys]).softmax(dim=-1)
                torch.mm(probs, values[:num_keys], out=out_rows[row])
    return out, None
