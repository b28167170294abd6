"""Absorbed multi-head latent attention's contracts.

Dimensions: T tokens of the step, N attention heads on this rank, L kv_lora_rank, R qk_rope_head_dim, V v_head_dim.
"""

from typing import Protocol

import torch
from torch import Tensor

from kimi_kernels.argument_checks import refuse, require_columns, require_dtype, require_float, require_shape
from kimi_kernels.attention_batch import AttentionBatch, DecodePlan


class PlanMlaDecode(Protocol):
    """Divide the batch's keys, once a step, for `MlaDecode` of every layer; on a GPU among thread blocks, on the device
    and without a host sync."""

    def __call__(
        self, batch: AttentionBatch, num_heads: int, block_size: int, split_tokens: int = 0
    ) -> DecodePlan | None:
        """
        Args:
            split_tokens: 0 balances over the batch; else a sequence is cut every so many tokens, whatever the batch.
        Returns:
            What `batch.decode_plan` is to be; None of a batch without sequences or rows.
        """
        ...


class MlaDecode(Protocol):
    """Absorbed multi-head latent attention (DeepSeek-V2, section 2.1.2) over paged latents: one KV read for all
    query rows of a sequence."""

    def __call__(
        self,
        q: Tensor,
        latent_cache: Tensor,
        batch: AttentionBatch,
        kv_lora_rank: int,
        softmax_scale: float,
        kv_scale: float = 1.0,
        return_lse: bool = False,
        row_keys: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            q: [T, N, L + R]: q_nope @ W_uk, then rotated q_pe; may be strided but for its columns.
            latent_cache: [num_blocks, block_size, L + R], contiguous; this step's rows are stored already.
            batch: its `decode_plan` is this kernel set's, or None; then it is planned here.
            row_keys: [T] int32, how many keys each row sees, where `batch` does not say so: where a cache holds some of
                each sequence's keys. From a sequence's row to its next the number rises or stays, up to at most its
                `seq_lens`. A row may see none.
        Returns:
            out: [T, N, L], softmax-weighted latents (the caller applies W_uv); 0 for rows without keys.
            lse: [T, N] float32, natural log of the softmax denominator; -inf for rows without keys; or None. Results
                over disjoint keys, each times exp(lse - lse of all), add up to the result over all of them.
        """
        ...


class MlaValues(Protocol):
    """`MlaDecode` and `PerHeadLinear`: attention up to the heads' values."""

    def __call__(
        self,
        q: Tensor,
        latent_cache: Tensor,
        batch: AttentionBatch,
        w_uv: Tensor,
        softmax_scale: float,
        kv_scale: float = 1.0,
    ) -> Tensor:
        """
        Args:
            q, latent_cache, batch: as in `MlaDecode`. w_uv: [N, L, V].
        Returns:
            [T, N, V]; 0 for rows of empty sequences.
        """
        ...


def check_decode(
    q: Tensor,
    latent_cache: Tensor,
    batch: AttentionBatch,
    kv_lora_rank: int,
    softmax_scale: float,
    kv_scale: float,
    row_keys: Tensor | None,
) -> None:
    """Raise unless the arguments are those of `MlaDecode`."""
    if latent_cache.dim() != 3:
        require_shape("latent_cache", latent_cache, None, None, None)
    latent_dim = latent_cache.shape[2]
    if q.dim() != 3 or q.shape[0] != batch.num_tokens or q.shape[2] != latent_dim:
        require_shape("q", q, batch.num_tokens, None, latent_dim)
    require_float("q", q)
    require_columns("q", q)
    if not latent_cache.is_contiguous():
        refuse("latent_cache", f"strides {latent_cache.stride()}", "a contiguous tensor")
    if not 0 < kv_lora_rank <= latent_dim:
        refuse("kv_lora_rank", kv_lora_rank, f"1 to {latent_dim}")
    if not softmax_scale > 0:
        refuse("softmax_scale", softmax_scale, "a positive number")
    if not kv_scale > 0:
        refuse("kv_scale", kv_scale, "a positive number")
    if row_keys is not None:
        require_shape("row_keys", row_keys, batch.num_tokens)
        require_dtype("row_keys", row_keys, torch.int32)
