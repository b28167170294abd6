"""Reference of multi-head and grouped-query attention over a paged cache, one query row at a time.

Shapes: KH key heads, G query heads a key head (GP: padded to 16), D head_dim, n keys of the row. The shapes that the
BLAS sees depend on KH, G and n only.
"""

import math

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_dtype, require_float, require_shape
from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.paged_rows import read_slots, sequences_with_queries, write_slots
from kimi_kernels.row_tiles import WIDTH_MULTIPLE, ceil_to_width


def store_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float = 1.0) -> None:
    """`signatures.StoreKv`; a slot of -1 writes nothing.

    Raises:
        ValueError: k, v and kv_cache differ in heads or width, or the cache's keys or values are not contiguous.
    """
    require_shape("kv_cache", kv_cache, 2, None, None, None, None)
    num_kv_heads, head_dim = kv_cache.shape[3:]
    require_shape("k", k, None, num_kv_heads, head_dim)
    require_shape("v", v, *k.shape)
    require(kv_cache[0].is_contiguous(), "kv_cache", f"strides {kv_cache.stride()}", "contiguous keys and values")
    require_shape("slot_mapping", slot_mapping, k.shape[0])
    require_dtype("slot_mapping", slot_mapping, torch.int64)
    for cache, rows in zip(kv_cache, (k, v), strict=True):
        write_slots(cache.view(-1, num_kv_heads, head_dim), slot_mapping, rows, kv_scale)


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
    require_shape("kv_cache", kv_cache, 2, None, None, None, None)
    block_size, num_kv_heads, head_dim = kv_cache.shape[2:]
    require_shape("q", q, batch.num_tokens, None, head_dim)
    require_float("q", q)
    num_tokens, num_heads, _ = q.shape
    require(num_heads % num_kv_heads == 0, "q", f"{num_heads} heads", f"a multiple of num_kv_heads {num_kv_heads}")
    require(sliding_window is None or sliding_window > 0, "sliding_window", sliding_window, "None or at least 1")
    group = num_heads // num_kv_heads
    tiles = (num_tokens, num_kv_heads, ceil_to_width(group), head_dim)
    q_tiles = torch.zeros(tiles, dtype=torch.float32, device=q.device)
    q_tiles[:, :, :group] = q.reshape(num_tokens, num_kv_heads, group, head_dim).float() * softmax_scale
    out_tiles = torch.zeros(tiles, dtype=torch.float32, device=q.device)
    q_rows, out_rows = q_tiles.unbind(), out_tiles.unbind()
    for sequence, first, num_rows, length in sequences_with_queries(batch, block_size):
        oldest = 0 if sliding_window is None else max(0, length - num_rows + 1 - sliding_window)
        first_block = _first_block(oldest, block_size)
        base = first_block * block_size
        block_ids = batch.block_table[sequence, first_block : -(-length // block_size)]
        keys_t = read_slots(kv_cache[0], block_ids, kv_scale).permute(1, 2, 0)
        values = read_slots(kv_cache[1], block_ids, kv_scale).transpose(0, 1)
        for row in range(first, first + num_rows):
            stop = length - (first + num_rows - 1 - row)
            if stop <= 0:
                continue
            start = 0 if sliding_window is None else max(0, stop - sliding_window)
            seen = slice(start - base, stop - base)
            scores = torch.bmm(q_rows[row], keys_t[:, :, seen])
            probs = scores.softmax(dim=-1, dtype=torch.float64).float()
            torch.bmm(probs, values[:, seen], out=out_rows[row])
    return out_tiles[:, :, :group].reshape(num_tokens, num_heads, head_dim).to(q.dtype)


def _first_block(oldest_key: int, block_size: int) -> int:
    """First block to gather: at or before the oldest key that any row sees, and on a multiple of 16 keys, so that a
    key's alignment in memory does not depend on which rows ride along."""
    stride = math.lcm(block_size, WIDTH_MULTIPLE)
    return oldest_key // stride * (stride // block_size)
