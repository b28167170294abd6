"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over a paged latent cache.

Dimensions: T tokens, N heads of this rank, H input width, Q q_lora_rank, L kv_lora_rank, P qk_nope_head_dim,
R qk_rope_head_dim, V v_head_dim, O hidden_size; A = all heads.

| tensor | shape | held as |
|---|---|---|
| q_a_proj.weight | [Q, H] | stacked with kv_a_proj_with_mqa |
| q_a_layernorm.weight | [Q] | |
| q_b_proj.weight | [A * (P + R), Q] | this rank's heads |
| q_proj.weight, in place of these three | [A * (P + R), H] | this rank's heads, stacked likewise |
| kv_a_proj_with_mqa.weight | [L + R, H] | every rank |
| kv_a_layernorm.weight | [L] | |
| kv_b_proj.weight | [A * (P + V), L] | this rank's heads, split into w_uk [N, P, L] and w_uv [N, L, V] |
| o_proj.weight | [O, A * V] | this rank's heads |
| .bias beside any of them but kv_b_proj, in some drafts | [rows] | likewise |
"""

import torch

from kimi_backend.config.mla_dims import MlaDims
from kimi_backend.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from kimi_backend.layers.weight_loader import Shard, WeightLoader
from kimi_kernels.attention_batch import AttentionMetadata


class MlaAttention:
    """Projections, cache write, attention and output projection of one layer.

    Decode rows take the absorbed form (queries are moved into the latent space, one KV read for all heads), prefill
    rows the expanded one.
    """

    def __init__(
        self,
        loader: WeightLoader,
        dims: MlaDims,
        cos_sin: torch.Tensor,
        *,
        hidden_size: int,
        rms_norm_eps: float,
        input_size: int | None = None,
    ) -> None:
        """
        Args:
            cos_sin: [max_positions, R] float32, see `layers.rotary.cos_sin_table`.
            input_size: width of the rows read, H; hidden_size unless given. An EAGLE3 draft reads 2 * hidden_size.
        """
        start, stop = loader.bounds(f"{loader.prefix}num_attention_heads", dims.num_attention_heads)
        self._dims = dims
        self._latent_dim, self._qk_head_dim = dims.latent_dim, dims.qk_head_dim
        self._softmax_scale = dims.softmax_scale
        self._eps = rms_norm_eps
        self._kernels = loader.kernels
        self._cos_sin = cos_sin
        self._num_heads = stop - start
        self._load_query(loader, input_size or hidden_size)
        self._kv_a_norm = loader.vector("kv_a_layernorm.weight", dims.kv_lora_rank)
        self._w_uk, self._w_uv = self._load_up_projections(loader)
        out_shape = (hidden_size, dims.num_attention_heads * dims.v_head_dim)
        self._o_proj = RowParallelLinear.load(loader, "o_proj", out_shape)

    def _load_query(self, loader: WeightLoader, input_size: int) -> None:
        g = self._dims
        kv_a = ("kv_a_proj_with_mqa", (g.latent_dim, input_size))
        all_heads = g.num_attention_heads * g.qk_head_dim
        self._q_b: ColumnParallelLinear | None = None
        self._q_a_norm: torch.Tensor | None = None
        if g.q_lora_rank is None:
            self._query_width = self._num_heads * g.qk_head_dim
            parts = [("q_proj", (all_heads, input_size), Shard.ROWS), (*kv_a, Shard.NONE)]
            self._qkv_a = ReplicatedLinear(loader.stacked(parts), loader.kernels, loader.stacked_bias(parts))
            return
        self._query_width = g.q_lora_rank
        self._qkv_a = ReplicatedLinear.load(loader, [("q_a_proj", (g.q_lora_rank, input_size)), kv_a])
        self._q_a_norm = loader.vector("q_a_layernorm.weight", g.q_lora_rank)
        self._q_b = ColumnParallelLinear.load(loader, [("q_b_proj", (all_heads, g.q_lora_rank))])

    def _load_up_projections(self, loader: WeightLoader) -> tuple[torch.Tensor, torch.Tensor]:
        g = self._dims
        head_width = g.qk_nope_head_dim + g.v_head_dim
        kv_b = loader.matrix("kv_b_proj", (g.num_attention_heads * head_width, g.kv_lora_rank), Shard.ROWS)
        per_head = kv_b.view(self._num_heads, head_width, g.kv_lora_rank)
        w_uk, w_uv = torch.split(per_head, [g.qk_nope_head_dim, g.v_head_dim], dim=1)
        # Copies, so that kv_b itself is not kept: of one head, w_uk lies in it as it should.
        return w_uk.clone(memory_format=torch.contiguous_format), w_uv.transpose(1, 2).contiguous()

    def __call__(
        self, x: torch.Tensor, metadata: AttentionMetadata, latent_cache: torch.Tensor, kv_scale: float
    ) -> torch.Tensor:
        """
        Args:
            x: [T, H], normed.
            latent_cache: [num_blocks, block_size, L + R], written in place.
        Returns:
            This rank's term of the sum over ranks, [T, hidden_size].
        """
        g = self._dims
        query, kv_a = torch.split(self._qkv_a(x), [self._query_width, self._latent_dim], dim=1)
        stored = (
            kv_a,
            self._kv_a_norm,
            self._eps,
            self._cos_sin,
            metadata.positions,
            g.rope.interleaved,
            latent_cache,
            metadata.slot_mapping,
            kv_scale,
        )
        if self._q_b is not None and self._q_a_norm is not None:
            query = self._q_b(self._kernels.norm_store_latent(query, self._q_a_norm, *stored))
        else:
            self._kernels.store_latent(*stored)
        q = query.reshape(-1, self._num_heads, self._qk_head_dim)
        heads = self._attend(q, metadata, latent_cache, kv_scale)
        return self._o_proj(heads.reshape(-1, self._num_heads * g.v_head_dim))

    def _attend(
        self,
        q: torch.Tensor,
        metadata: AttentionMetadata,
        latent_cache: torch.Tensor,
        kv_scale: float,
    ) -> torch.Tensor:
        """[T, N, V] from q [T, N, P + R], not rotated yet."""
        g = self._dims
        num_decode = metadata.num_decode_tokens
        outputs = []
        if metadata.decode is not None:
            rows, positions = q, metadata.positions
            if metadata.prefill is not None:
                rows, positions = q[:num_decode], positions[:num_decode]
            q_latent = self._kernels.mla_query(rows, self._w_uk, self._cos_sin, positions, g.rope.interleaved)
            outputs.append(
                self._kernels.mla_values(
                    q_latent, latent_cache, metadata.decode, self._w_uv, self._softmax_scale, kv_scale
                )
            )
        if metadata.prefill is not None:
            q_nope, q_pe = torch.split(q[num_decode:], [g.qk_nope_head_dim, g.qk_rope_head_dim], dim=2)
            q_pe = self._kernels.rope(q_pe, self._cos_sin, metadata.positions[num_decode:], g.rope.interleaved)
            outputs.append(
                self._kernels.mla_prefill(
                    torch.cat([q_nope, q_pe], dim=2),
                    latent_cache,
                    self._w_uk,
                    self._w_uv,
                    metadata.prefill,
                    self._softmax_scale,
                    kv_scale,
                )
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
