"""Multi-head or grouped-query attention of the Llama draft, over a paged cache of keys and values.

| tensor | shape | held as |
|---|---|---|
| q_proj.weight | [num_heads * head_dim, input_size] | this rank's heads, stacked with k_proj and v_proj |
| k_proj.weight, v_proj.weight | [num_kv_heads * head_dim, input_size] | this rank's heads |
| o_proj.weight | [hidden_size, num_heads * head_dim] | this rank's heads |
| .bias beside any of them, in some drafts | [rows] | likewise |
"""

import torch

from kimi_backend.config.draft_config import Eagle3MhaDraftConfig
from kimi_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from kimi_backend.layers.weight_loader import WeightLoader
from kimi_kernels.attention_batch import AttentionMetadata


class MhaAttention:
    """Projections, rotation, cache write, attention and output projection of one layer."""

    def __init__(
        self, loader: WeightLoader, config: Eagle3MhaDraftConfig, cos_sin: torch.Tensor, *, input_size: int
    ) -> None:
        """
        Args:
            cos_sin: [max_positions, head_dim] float32, see `layers.rotary.cos_sin_table`.
            input_size: width of the rows read.
        """
        g = config
        start, stop = loader.bounds(f"{loader.prefix}num_attention_heads", g.num_attention_heads)
        kv_start, kv_stop = loader.bounds(f"{loader.prefix}num_key_value_heads", g.num_key_value_heads)
        self._config = g
        self._kernels = loader.kernels
        self._cos_sin = cos_sin
        self._num_heads = stop - start
        self._num_kv_heads = kv_stop - kv_start
        q_width = g.num_attention_heads * g.head_dim
        kv_shape = (g.num_key_value_heads * g.head_dim, input_size)
        self._qkv = ColumnParallelLinear.load(
            loader, [("q_proj", (q_width, input_size)), ("k_proj", kv_shape), ("v_proj", kv_shape)]
        )
        self._o_proj = RowParallelLinear.load(loader, "o_proj", (g.hidden_size, q_width))

    def __call__(
        self, x: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor, kv_scale: float
    ) -> torch.Tensor:
        """
        Args:
            x: [T, input_size], normed.
            kv_cache: [2, num_blocks, block_size, num_kv_heads of this rank, head_dim], written in place.
            kv_scale: a float8 cache holds values divided by it; else 1.
        Returns:
            This rank's term of the sum over ranks, [T, hidden_size].
        """
        g = self._config
        qkv = self._qkv(x).view(x.shape[0], -1, g.head_dim)
        qk, v = torch.split(qkv, [self._num_heads + self._num_kv_heads, self._num_kv_heads], dim=1)
        qk = self._kernels.rope(qk, self._cos_sin, metadata.positions, g.rope.interleaved)
        q, k = torch.split(qk, [self._num_heads, self._num_kv_heads], dim=1)
        self._kernels.store_kv(k, v, kv_cache, metadata.slot_mapping, kv_scale)
        batch = metadata.decode
        assert batch is not None and metadata.prefill is None, "one kernel for rows of any number"
        heads = self._kernels.mha_attention(q, kv_cache, batch, g.softmax_scale, g.sliding_window, kv_scale)
        return self._o_proj(heads.reshape(-1, self._num_heads * g.head_dim))
