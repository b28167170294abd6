"""Non-absorbed multi-head latent attention's contract.

Dimensions: T tokens of the step, N attention heads on this rank, L kv_lora_rank, P qk_nope_head_dim,
R qk_rope_head_dim, V v_head_dim.
"""

from typing import Protocol

from torch import Tensor

from kimi_kernels.argument_checks import refuse, require_columns, require_float, require_shape
from kimi_kernels.attention_batch import AttentionBatch, check_block_table


class MlaPrefill(Protocol):
    """Non-absorbed MLA for many new tokens: K and V are up-projected from the cached latents, chunk by chunk."""

    def __call__(
        self,
        q: Tensor,
        latent_cache: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        batch: AttentionBatch,
        softmax_scale: float,
        kv_scale: float = 1.0,
    ) -> Tensor:
        """
        Args:
            q: [T, N, P + R], rotated, may be strided but for its columns.
            latent_cache: [num_blocks, block_size, L + R], contiguous; this step's rows are stored already.
            w_uk: [N, P, L]. w_uv: [N, L, V].
        Returns:
            [T, N, V]; 0 for rows without keys.
        """
        ...


def check_prefill(
    q: Tensor,
    latent_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    batch: AttentionBatch,
    softmax_scale: float,
    kv_scale: float,
) -> None:
    """Raise unless the arguments are those of `MlaPrefill`."""
    require_shape("latent_cache", latent_cache, None, None, None)
    require_shape("w_uk", w_uk, None, None, None)
    num_heads, nope_dim, kv_lora_rank = w_uk.shape
    rope_dim = latent_cache.shape[2] - kv_lora_rank
    if rope_dim < 0:
        refuse("w_uk", f"{kv_lora_rank} columns", f"at most latent_cache's {latent_cache.shape[2]}")
    require_shape("w_uv", w_uv, num_heads, kv_lora_rank, None)
    require_shape("q", q, batch.num_tokens, num_heads, nope_dim + rope_dim)
    require_float("q", q)
    require_columns("q", q)
    if not latent_cache.is_contiguous():
        refuse("latent_cache", f"strides {latent_cache.stride()}", "a contiguous tensor")
    if not softmax_scale > 0:
        refuse("softmax_scale", softmax_scale, "a positive number")
    if not kv_scale > 0:
        refuse("kv_scale", kv_scale, "a positive number")
    check_block_table(batch)
