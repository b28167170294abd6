"""Multi-head and grouped-query attention in torch, one query row at a time over exactly its own keys.

Shapes: KH key heads, G query heads a key head, D head_dim, n keys of the row. The shapes that the BLAS sees depend on
KH, G, D and n only.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.mha_attention.op import check_mha, check_store_kv
from kimi_kernels.paged_rows import read_slots, seeing_rows, write_slots
from kimi_kernels.row_products import aligned, keeps_rows_aligned
from kimi_kernels.row_tiles import WIDTH_MULTIPLE, ceil_to_width


def store_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float = 1.0) -> None:
    """`StoreKv`."""
    check_store_kv(k, v, kv_cache, slot_mapping, kv_scale)
    keys, values = kv_cache.flatten(1, 2).unbind()
    write_slots(keys, slot_mapping, k, kv_scale)
    write_slots(values, slot_mapping, v, kv_scale)


def mha_attention(
    q: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    softmax_scale: float,
    sliding_window: int | None,
    kv_scale: float = 1.0,
) -> Tensor:
    """`MhaAttention`."""
    check_mha(q, kv_cache, batch, softmax_scale, sliding_window, kv_scale)
    block_size, num_kv_heads, head_dim = kv_cache.shape[2:]
    group = q.shape[1] // num_kv_heads
    rows = (q if q.dtype == torch.float32 else q.float()) * softmax_scale
    rows = rows.reshape(q.shape[0], num_kv_heads, group, head_dim)
    if not keeps_rows_aligned(head_dim):
        rows = pad(rows, (0, 0, 0, ceil_to_width(group) - group))
    out = torch.zeros(rows.shape, device=q.device)
    # A GPU divides a row's sum among threads as it likes: in float64 no result shows that.
    wide = torch.float64 if q.is_cuda else torch.float32
    q_rows, out_rows = aligned(rows).unbind(), out.unbind()
    for one in seeing_rows(batch, block_size):
        oldest = 0 if sliding_window is None else max(0, one.num_keys[0] - sliding_window)
        first_block = _first_block(oldest, block_size)
        base = first_block * block_size
        block_ids = batch.block_table[one.sequence, first_block : -(-one.num_keys[-1] // block_size)]
        keys_t = read_slots(kv_cache[0], block_ids, kv_scale).permute(1, 2, 0)
        values = read_slots(kv_cache[1], block_ids, kv_scale).transpose(0, 1)
        for row, stop in enumerate(one.num_keys, one.first):
            start = 0 if sliding_window is None else max(0, stop - sliding_window)
            seen = slice(start - base, stop - base)
            probs = torch.bmm(q_rows[row], keys_t[:, :, seen]).softmax(dim=-1, dtype=wide)
            torch.bmm(probs if wide == torch.float32 else probs.float(), values[:, seen], out=out_rows[row])
    return out[:, :, :group].reshape(q.shape).to(q.dtype)


def _first_block(oldest_key: int, block_size: int) -> int:
    """First block to gather: at or before the oldest key that any row sees, and on a multiple of 16 keys, so that a
    key's alignment in memory does not depend on which rows ride along."""
    stride = math.lcm(block_size, WIDTH_MULTIPLE)
    return oldest_key // stride * (stride // block_size)
