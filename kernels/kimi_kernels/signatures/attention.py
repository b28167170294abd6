"""Attention over paged caches: multi-head latent attention, and multi-head attention for the Llama draft.

Dimensions: T tokens of the step, N attention heads on this rank, L kv_lora_rank, P qk_nope_head_dim,
R qk_rope_head_dim, V v_head_dim.
"""

from typing import Protocol

from torch import Tensor

from kimi_kernels.attention_batch import AttentionBatch, DecodePlan


class PlanMlaDecode(Protocol):
    """Divide the batch's keys among thread blocks, on the device, without a host sync."""

    def __call__(
        self, batch: AttentionBatch, num_heads: int, block_size: int, split_tokens: int = 0
    ) -> DecodePlan | None:
        """split_tokens: 0 balances over the batch; else a sequence is cut every so many tokens, whatever the batch."""
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
            q: [T, N, L + R]: q_nope @ W_uk, then rotated q_pe.
            latent_cache: [num_blocks, block_size, L + R]; this step's rows are stored already.
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
            q, latent_cache: as in `MlaDecode`. w_uv: [N, L, V].
        Returns:
            [T, N, V]; 0 for rows of empty sequences.
        """
        ...


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
            q: [T, N, P + R], rotated.
            latent_cache: [num_blocks, block_size, L + R]; this step's rows are stored already.
            w_uk: [N, P, L]. w_uv: [N, L, V].
        Returns:
            [T, N, V].
        """
        ...


class StoreKv(Protocol):
    """Write this step's keys and values into the paged cache, in place."""

    def __call__(self, k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float = 1.0) -> None:
        """
        Args:
            k, v: [T, num_kv_heads, head_dim].
            kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim]; float8 holds value / kv_scale, values beyond
                its range become its largest one.
        """
        ...


class MhaAttention(Protocol):
    """Multi-head or grouped-query attention over a paged cache, for the Llama draft."""

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
            q: [T, N, head_dim], rotated. kv_cache: as in `StoreKv`, N a multiple of num_kv_heads.
            sliding_window: a row at position p sees keys p - sliding_window + 1 up to p; None sees all.
        """
        ...
