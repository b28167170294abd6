"""Absorbed MLA attention in float32: one query row at a time over exactly its own keys.

Shapes: N heads, D = L + R, n keys of the row. The shapes that the BLAS sees depend on N, D and n only.
"""

from functools import lru_cache

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
    row_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`signatures.MlaDecode`.

    Raises:
        ValueError: q and latent_cache differ in width, or the batch does not fit them.
    """
    num_tokens, num_heads, latent_dim = q.shape
    fits = latent_cache.shape[2:] == (latent_dim,) and num_tokens == batch.num_tokens and kv_lora_rank <= latent_dim
    is_aligned = keeps_rows_aligned(num_heads * latent_dim, num_heads * kv_lora_rank)
    if not fits or not is_aligned or q.dtype != torch.float32 or return_lse or row_keys is not None:
        return reference.mla_decode(q, latent_cache, batch, kv_lora_rank, softmax_scale, kv_scale, return_lse, row_keys)
    block_size = latent_cache.shape[1]
    out = torch.zeros(num_tokens, num_heads, kv_lora_rank)
    q_rows, out_rows = aligned(q * softmax_scale).unbind(), out.unbind()
    is_plain = latent_cache.dtype == torch.float32 and kv_scale == 1.0
    sequences = _sequences(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, batch.num_tokens, block_size)
    for block_ids, start, first, num_rows, length in sequences:
        if is_plain and start is not None:
            latents = latent_cache[start : start + len(block_ids)].flatten(0, 1)
        else:
            latents = read_slots(latent_cache, block_ids, kv_scale)
        keys_t, values = latents.t(), latents[:, :kv_lora_rank]
        for row in range(first, first + num_rows):
            num_keys = length - (first + num_rows - 1 - row)
            if num_keys > 0:
                probs = torch.mm(q_rows[row], keys_t[:, :num_keys]).softmax(dim=-1)
                torch.mm(probs, values[:num_keys], out=out_rows[row])
    return out, None


@lru_cache(maxsize=4)
def _sequences(
    cu_seqlens_q: Tensor, seq_lens: Tensor, block_table: Tensor, num_tokens: int, block_size: int
) -> tuple[tuple[Tensor, int | None, int, int, int], ...]:
    """(block ids, the first of them where they follow one another, first query row, query rows, length) of every
    sequence that has keys and queries. All layers of a step ask for the same, with the same tensors."""
    batch = AttentionBatch(
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        block_table=block_table,
        num_tokens=num_tokens,
        max_query_len=num_tokens,
        max_seq_len=0,
    )
    found = []
    for sequence, first, num_rows, length in sequences_with_queries(batch, block_size):
        block_ids = block_table[sequence, : -(-length // block_size)]
        ids = block_ids.tolist()
        start = ids[0] if ids == list(range(ids[0], ids[0] + len(ids))) else None
        found.append((block_ids, start, first, num_rows, length))
    return tuple(found)
