"""Multi-head attention's contracts, over a paged cache, for the Llama draft.

Dimensions: T tokens of the step, N attention heads and KH key heads on this rank, D head_dim.
"""

from typing import Protocol

import torch
from torch import Tensor

from kimi_kernels.argument_checks import refuse, require_columns, require_dtype, require_float, require_shape
from kimi_kernels.attention_batch import AttentionBatch


class StoreKv(Protocol):
    """Write this step's keys and values into the paged cache, in place."""

    def __call__(self, k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float = 1.0) -> None:
        """
        Args:
            k, v: [T, KH, D], may be strided but for their columns.
            kv_cache: [2, num_blocks, block_size, KH, D], keys and values each contiguous; float8 holds
                value / kv_scale, values beyond its range become its largest one.
            slot_mapping: [T] int64; -1 writes nothing.
            kv_scale: 1 of a cache that is not float8.
        """
        ...


class MhaAttention(Protocol):
    """Multi-head or grouped-query attention over a paged cache."""

    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        batch: AttentionBatch,
        softmax_scale: float,
        sliding_window: int | None,
        kv_scale: float = 1.0,
    ) -> Tensor:
        """
        Args:
            q: [T, N, D], rotated, may be strided but for its columns. kv_cache, kv_scale: as in `StoreKv`, N a multiple
                of KH.
            sliding_window: a row at position p sees keys p - sliding_window + 1 up to p; None sees all.
        Returns:
            [T, N, D]; 0 for rows without keys.
        """
        ...


def check_store_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float) -> None:
    """Raise unless the arguments are those of `StoreKv`."""
    check_kv_cache(kv_cache, kv_scale)
    num_tokens = k.shape[0] if k.dim() else 0
    for name, rows in (("k", k), ("v", v)):
        if rows.shape != (num_tokens, *kv_cache.shape[3:]):
            require_shape(name, rows, num_tokens, *kv_cache.shape[3:])
        require_float(name, rows)
        require_columns(name, rows)
    if slot_mapping.shape != (num_tokens,):
        require_shape("slot_mapping", slot_mapping, num_tokens)
    require_dtype("slot_mapping", slot_mapping, torch.int64)


def check_mha(
    q: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    softmax_scale: float,
    sliding_window: int | None,
    kv_scale: float,
) -> None:
    """Raise unless the arguments are those of `MhaAttention`."""
    check_kv_cache(kv_cache, kv_scale)
    num_kv_heads, head_dim = kv_cache.shape[3:]
    if q.dim() != 3 or q.shape[0] != batch.num_tokens or q.shape[2] != head_dim:
        require_shape("q", q, batch.num_tokens, None, head_dim)
    require_float("q", q)
    require_columns("q", q)
    if q.shape[1] % num_kv_heads:
        refuse("q", f"{q.shape[1]} heads", f"a multiple of kv_cache's {num_kv_heads}")
    if not softmax_scale > 0:
        refuse("softmax_scale", softmax_scale, "a positive number")
    if sliding_window is not None and sliding_window < 1:
        refuse("sliding_window", sliding_window, "None or at least 1")


def check_kv_cache(kv_cache: Tensor, kv_scale: float) -> None:
    """Raise unless the cache is one of `StoreKv`'s, with a scale that it may have."""
    if kv_cache.dim() != 5 or kv_cache.shape[0] != 2:
        require_shape("kv_cache", kv_cache, 2, None, None, None, None)
    if not kv_cache.is_contiguous() and not kv_cache[0].is_contiguous():
        refuse("kv_cache", f"strides {kv_cache.stride()}", "contiguous keys and values")
    if not kv_scale > 0 or (kv_scale != 1.0 and kv_cache.dtype != torch.float8_e4m3fn):
        refuse("kv_scale", kv_scale, "1, or of a float8 cache above 0")
