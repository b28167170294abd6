"""`mha_attention` and `store_kv` in Triton-language: scratch and launches around the kernels."""

import math

import torch
import triton
from torch import Tensor

from kimi_kernels.argument_checks import require, require_dtype
from kimi_kernels.attention_batch import AttentionBatch, check_block_table
from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.kernel_interpreter import INTERPRETED, math_dtype, num_processors
from kimi_kernels.mha_attention.kernel_attend import attend_kernel, merge_kernel, store_kv_kernel
from kimi_kernels.mha_attention.op import check_mha, check_store_kv
from kimi_kernels.quantization.plain import FP8_MAX

FLOAT8 = torch.float8_e4m3fn
TILE_KEYS = 64
MAX_SPLITS = 64


def store_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float = 1.0) -> None:
    """`StoreKv`, of the cache's dtype but for a float8 cache."""
    check_store_kv(k, v, kv_cache, slot_mapping, kv_scale)
    is_float8 = kv_cache.dtype == FLOAT8
    if not is_float8:
        require_dtype("k", k, kv_cache.dtype)
        require_dtype("v", v, kv_cache.dtype)
    num_kv_heads, head_dim = kv_cache.shape[3:]
    if not k.numel():
        return
    store_kv_kernel[(k.shape[0], 2)](
        k, v, kv_cache[0], kv_cache[1], slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        num_kv_heads, head_dim, 1.0 / kv_scale, FP8_MAX, HEADS=triton.next_power_of_2(num_kv_heads),
        D=triton.next_power_of_2(head_dim), IS_FLOAT8=is_float8, num_warps=4, **pdl_options(k.device),
    )  # fmt: skip


def mha_attention(
    q: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    softmax_scale: float,
    sliding_window: int | None,
    kv_scale: float = 1.0,
) -> Tensor:
    """`MhaAttention`, of bf16 and float16, for heads and blocks whose sizes are powers of two."""
    check_mha(q, kv_cache, batch, softmax_scale, sliding_window, kv_scale)
    check_block_table(batch)
    _check_limits(q, kv_cache)
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_cache.shape[2:4]
    num_seqs = batch.seq_lens.shape[0]
    if not num_seqs or not num_tokens:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    rows = num_heads // num_kv_heads * max(1, batch.max_query_len)
    tile_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    num_tiles = triton.cdiv(rows, tile_rows)
    splits = _num_splits(num_seqs * num_tiles * num_kv_heads, batch.max_seq_len, sliding_window, q.device)
    if splits == 1:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        part_out = part_lse = None
    else:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        part_out = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(splits, num_tokens, num_heads, dtype=torch.float32, device=q.device)
    early = pdl_options(q.device)
    attend_kernel[(num_seqs * num_tiles, num_kv_heads, splits)](
        q, kv_cache[0], kv_cache[1], batch.block_table, batch.cu_seqlens_q, batch.seq_lens, out, part_out, part_lse,
        q.stride(0), q.stride(1), batch.block_table.stride(0), num_tokens, num_heads, num_kv_heads, num_tiles,
        sliding_window or 1 << 30, softmax_scale * kv_scale * math.log2(math.e), kv_scale, D=head_dim,
        PAGE=block_size, R=tile_rows, K=TILE_KEYS, SPLITS=splits, MATH=math_dtype(q.dtype), STAGES=3,
        num_warps=8 if tile_rows == 128 else 4, num_stages=3, **early,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(num_tokens * num_heads,)](
            part_out, part_lse, batch.cu_seqlens_q, out, num_seqs, num_tokens * num_heads, num_heads,
            D=head_dim, SPLITS=splits, num_warps=4, **early,
        )  # fmt: skip
    return out


def _num_splits(num_programs: int, max_seq_len: int, sliding_window: int | None, device: torch.device) -> int:
    """Shares of a sequence's keys: enough programs for two on each multiprocessor, each with a few tiles."""
    keys = max_seq_len if sliding_window is None else min(max_seq_len, sliding_window)
    wanted = min(2 * num_processors(device) // max(1, num_programs), keys // (2 * TILE_KEYS), MAX_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1) if wanted > 1 else 1


def _check_limits(q: Tensor, kv_cache: Tensor) -> None:
    """Raise at what the kernels do not take."""
    require_dtype("q", q, torch.bfloat16, torch.float16, *([torch.float32] if INTERPRETED else []))
    require_dtype("kv_cache", kv_cache, q.dtype, FLOAT8)
    for name, width in (("q", q.shape[2]), ("kv_cache", kv_cache.shape[2])):
        require(width >= 16 and width & (width - 1) == 0, name, f"width {width}", "a power of two from 16 up")
