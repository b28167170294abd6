"""The latent cache write's contracts.

Dimensions: T tokens of the step, Q q_lora_rank, L kv_lora_rank, R qk_rope_head_dim.
"""

from typing import Protocol

from torch import Tensor

from kimi_kernels.argument_checks import refuse, require_columns, require_float, require_shape
from kimi_kernels.rms_norm.op import check_norm
from kimi_kernels.rope.op import check_rotation, check_row_numbers


class StoreLatent(Protocol):
    """Norm the compressed KV, rotate the shared key, write both into the paged latent cache, in place."""

    def __call__(
        self,
        kv_a: Tensor,
        norm_weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        interleaved: bool,
        latent_cache: Tensor,
        slot_mapping: Tensor,
        kv_scale: float = 1.0,
    ) -> None:
        """
        Args:
            kv_a: [T, L + R], output of kv_a_proj_with_mqa, raw; may be strided between rows.
            norm_weight: [L], kv_a_layernorm.
            cos_sin, positions, interleaved: as in `Rope`.
            latent_cache: [num_blocks, block_size, L + R], contiguous; float8 holds value / kv_scale, values beyond its
                range become its largest one.
            slot_mapping: [T] int64; -1 writes nothing.
        """
        ...


class NormStoreLatent(Protocol):
    """`RmsNorm` of a step's low-rank queries, and `StoreLatent`: both read the same product's result."""

    def __call__(
        self,
        query: Tensor,
        query_weight: Tensor,
        kv_a: Tensor,
        norm_weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        interleaved: bool,
        latent_cache: Tensor,
        slot_mapping: Tensor,
        kv_scale: float = 1.0,
    ) -> Tensor:
        """
        Args:
            query: [T, Q], may be strided between rows. query_weight: [Q], q_a_layernorm.
            kv_a ... kv_scale: as in `StoreLatent`.
        Returns:
            [T, Q], the queries normed.
        """
        ...


def check_store_latent(
    kv_a: Tensor, norm_weight: Tensor, cos_sin: Tensor, positions: Tensor, latent_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Raise unless the arguments are those of `StoreLatent`."""
    if norm_weight.dim() != 1:
        require_shape("norm_weight", norm_weight, None)
    if kv_a.dim() != 2:
        require_shape("kv_a", kv_a, None, None)
    require_float("kv_a", kv_a)
    require_columns("kv_a", kv_a)
    num_tokens, latent_dim = kv_a.shape
    width = norm_weight.numel()
    if not 0 < width < latent_dim or (latent_dim - width) % 2:
        refuse("kv_a", f"{latent_dim} columns", f"norm_weight's {width} and an even number more")
    check_rotation(cos_sin, latent_dim - width, positions, num_tokens)
    check_row_numbers("slot_mapping", slot_mapping, num_tokens)
    if latent_cache.dim() != 3 or latent_cache.shape[2] != latent_dim:
        require_shape("latent_cache", latent_cache, None, None, latent_dim)
    if not latent_cache.is_contiguous():
        refuse("latent_cache", f"strides {latent_cache.stride()}", "a contiguous tensor")


def check_query(query: Tensor, query_weight: Tensor, num_tokens: int) -> None:
    """Raise unless the query and its weight are those of `NormStoreLatent`."""
    check_norm(query, query_weight, "query", "query_weight")
    if query.shape[0] != num_tokens:
        require_shape("query", query, num_tokens, query.shape[1])
