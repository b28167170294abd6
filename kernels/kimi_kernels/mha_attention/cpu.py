"""Multi-head and grouped-query attention in float32, one query row at a time.

Shapes: KH key heads, G query heads a key head, D head_dim, n keys of the row. The shapes that the BLAS sees depend on
KH, G, D and n only.
"""

import torch
from torch import Tensor

from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.mha_attention import reference
from kimi_kernels.paged_rows import read_slots, sequences_with_queries, write_slots
from kimi_kernels.row_products import aligned, keeps_rows_aligned


def store_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float = 1.0) -> None:
    """`signatures.StoreKv`; a slot of -1 writes nothing.

    Raises:
        ValueError: k, v and kv_cache differ in heads or width, or the cache's keys or values are not contiguous.
    """
    fits = k.shape == v.shape and k.shape[1:] == kv_cache.shape[3:] and len(slot_mapping) == len(k)
    if not fits or kv_cache.itemsize == 1 or kv_scale != 1.0 or not kv_cache.is_contiguous():
        reference.store_kv(k, v, kv_cache, slot_mapping, kv_scale)
        return
    keys, values = kv_cache.flatten(1, 2).unbind()
    write_slots(keys, slot_mapping, k)
    write_slots(values, slot_mapping, v)


def mha_attention(
    q: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    softmax_scale: float,
    sliding_window: int | None,
    kv_scale: float = 1.0,
) -> Tensor:
    """`signatures.MhaAttention`; 0 for rows of empty sequences.

    Raises:
        ValueError: q does not fit the cache, the batch does not fit them, or the window is not positive.
    """
    block_size, num_kv_heads, head_dim = kv_cache.shape[2:]
    num_tokens, num_heads = q.shape[:2]
    fits = q.shape[2:] == (head_dim,) and num_heads % num_kv_heads == 0 and num_tokens == batch.num_tokens
    is_aligned = keeps_rows_aligned(head_dim)
    if not fits or not is_aligned or q.dtype != torch.float32 or sliding_window is not None:
        return reference.mha_attention(q, kv_cache, batch, softmax_scale, sliding_window, kv_scale)
    group = num_heads // num_kv_heads
    out = torch.zeros(num_tokens, num_kv_heads, group, head_dim)
    q_rows, out_rows = aligned(q * softmax_scale).view_as(out).unbind(), out.unbind()
    for sequence, first, num_rows, length in sequences_with_queries(batch, block_size):
        block_ids = batch.block_table[sequence, : -(-length // block_size)]
        keys_t = read_slots(kv_cache[0], block_ids, kv_scale).permute(1, 2, 0)
        values = read_slots(kv_cache[1], block_ids, kv_scale).transpose(0, 1)
        for row in range(first, first + num_rows):
            num_keys = length - (first + num_rows - 1 - row)
            if num_keys > 0:
                probs = torch.bmm(q_rows[row], keys_t[:, :, :num_keys]).softmax(dim=-1)
                torch.bmm(probs, values[:, :num_keys], out=out_rows[row])
    return out.flatten(1, 2)
