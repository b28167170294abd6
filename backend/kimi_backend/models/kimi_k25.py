"""The target: Kimi-K2.x's language model, a DeepSeek-V3 decoder (arXiv 2412.19437, section 2.1).

| tensor (a `language_model.` prefix is dropped by the source) | shape |
|---|---|
| model.embed_tokens.weight | [vocab_size, hidden_size] |
| model.layers.I.input_layernorm.weight, .post_attention_layernorm.weight | [hidden_size] |
| model.layers.I.self_attn.* | see `layers.mla` |
| model.layers.I.mlp.* of a dense layer | see `layers.mlp` |
| model.layers.I.mlp.* of an expert layer | see `layers.moe` |
| model.norm.weight | [hidden_size] |
| lm_head.weight | [vocab_size, hidden_size] |

Layer I is dense while I < first_k_dense_replace, and where I is no multiple of moe_layer_freq.
"""

from dataclasses import dataclass

import torch

from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.layers.embedding import ParallelHead, VocabParallelEmbedding
from kimi_backend.layers.mla import MlaAttention
from kimi_backend.layers.mlp import DenseMlp
from kimi_backend.layers.moe import MoeMlp
from kimi_backend.layers.residual import RankTerms, add_rms_norm
from kimi_backend.layers.rotary import cos_sin_table
from kimi_backend.layers.weight_loader import WeightLoader
from kimi_backend.parallel import TensorParallelGroup
from kimi_kernels.attention_batch import AttentionMetadata
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.weights import FP8_BLOCK_SIZE, INT4_GROUP_SIZE


@dataclass(frozen=True, slots=True)
class EmbedAndHead:
    """The two vocabulary matrices, which a draft may share with its target."""

    embed: VocabParallelEmbedding
    head: ParallelHead


class KimiTarget:
    """The decoder stack of one rank. Rows of any mix of sequences in, hidden states and aux hidden states out."""

    def __init__(
        self,
        config: KimiModelConfig,
        source: TensorSource,
        kernels: KernelSet,
        group: TensorParallelGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            source: the checkpoint; this rank reads only its slices.
            dtype: of the computation: bf16 on a GPU, float32 with the plain kernels.
        Raises:
            CheckpointError: a tensor is missing or misshapen, or the ranks cannot divide a width.
        """
        loader = target_loader(config, source, kernels, group, device, dtype)
        self.config = config
        self.dtype = dtype
        self._kernels = kernels
        self._group = group
        cos_sin = cos_sin_table(config.qk_rope_head_dim, config.max_position_embeddings, config.rope, device)
        self._shared = load_embed_and_head(config, loader)
        self._layers = [
            DecoderLayer(config, index, loader.scoped(f"model.layers.{index}"), cos_sin)
            for index in range(config.num_hidden_layers)
        ]
        self._norm = loader.vector("model.norm.weight", config.hidden_size)

    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,
        kv_scale: float = 1.0,
        aux_layer_ids: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run all layers over one step's rows.

        Args:
            token_ids: [T] int32 or int64.
            kv_cache: [num_layers, num_blocks, block_size, latent_dim], written in place.
            aux_layer_ids: which R(j) to capture, 0 <= j <= num_layers.
        Returns:
            hidden_states: [T, hidden_size], after the final norm.
            aux_hidden_states: [T, len(aux_layer_ids) * hidden_size], the R(j) side by side in the order asked for;
                None when none is asked for.
        """
        captured: dict[int, torch.Tensor] = {}
        residual = self._shared.embed(token_ids)
        out: RankTerms | None = None
        for index, layer in enumerate(self._layers):
            out, residual, entering = layer(out, residual, metadata, kv_cache[index], kv_scale)
            if index in aux_layer_ids:
                captured[index] = entering
        assert out is not None, "a config has at least one layer"
        hidden_states, last = add_rms_norm(
            out, residual, self._norm, self.config.rms_norm_eps, self._kernels, self._group
        )
        captured[len(self._layers)] = last
        if not aux_layer_ids:
            return hidden_states, None
        return hidden_states, torch.cat([captured[j] for j in aux_layer_ids], dim=1)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [R, hidden_size], after the final norm -> [R, vocab_size] of its dtype on every rank."""
        return self._shared.head.logits(hidden_states)

    @property
    def num_heads(self) -> int:
        """Attention heads of this rank."""
        return self.config.num_attention_heads // self._group.size

    def kv_pool_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """[num_layers, num_blocks, block_size, latent_dim]: the cache that `forward` takes."""
        return (self.config.num_hidden_layers, num_blocks, block_size, self.config.latent_dim)

    def get_embed_and_head(self) -> EmbedAndHead:
        """This rank's slices, for a draft that shares them."""
        return self._shared


class DecoderLayer:
    """Attention and feed-forward around one residual stream."""

    def __init__(self, config: KimiModelConfig, index: int, loader: WeightLoader, cos_sin: torch.Tensor) -> None:
        self._kernels = loader.kernels
        self._group = loader.group
        self._eps = config.rms_norm_eps
        self._input_norm = loader.vector("input_layernorm.weight", config.hidden_size)
        self._attention = MlaAttention(
            loader.scoped("self_attn"),
            config,
            cos_sin,
            hidden_size=config.hidden_size,
            rms_norm_eps=config.rms_norm_eps,
        )
        self._post_norm = loader.vector("post_attention_layernorm.weight", config.hidden_size)
        mlp_loader = loader.scoped("mlp")
        self._mlp: MoeMlp | DenseMlp
        if config.is_moe_layer(index):
            self._mlp = MoeMlp(mlp_loader, config)
        else:
            self._mlp = DenseMlp(mlp_loader, config.hidden_size, config.intermediate_size)

    def __call__(
        self,
        out: RankTerms | None,
        residual: torch.Tensor,
        metadata: AttentionMetadata,
        latent_cache: torch.Tensor,
        kv_scale: float,
    ) -> tuple[RankTerms, torch.Tensor, torch.Tensor]:
        """
        Args:
            out: what the layer before adds to `residual`; None for the first layer.
        Returns:
            out: what this layer adds to `residual`.
            residual: [T, H].
            entering: [T, H], the residual stream that entered this layer, R(index).
        """
        if out is None:
            entering = residual
            normed = self._kernels.rms_norm(residual, self._input_norm, self._eps)
        else:
            normed, entering = self._add_norm(out, residual, self._input_norm)
        attended = self._attention(normed, metadata, latent_cache, kv_scale)
        normed, residual = self._add_norm(RankTerms(attended), entering, self._post_norm)
        if isinstance(self._mlp, MoeMlp):
            return self._mlp(normed, metadata.slot_mapping), residual, entering
        return RankTerms(self._mlp(normed)), residual, entering

    def _add_norm(
        self, out: RankTerms, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(out, residual, weight, self._eps, self._kernels, self._group)


def target_loader(
    config: KimiModelConfig,
    source: TensorSource,
    kernels: KernelSet,
    group: TensorParallelGroup,
    device: torch.device,
    dtype: torch.dtype,
) -> WeightLoader:
    """A loader that knows the checkpoint's quantisation block sizes."""
    return WeightLoader(
        source,
        kernels,
        group,
        device,
        dtype,
        fp8_block_size=config.quantization.fp8_block_size or FP8_BLOCK_SIZE,
        int4_group_size=config.expert_format.group_size or INT4_GROUP_SIZE,
    )


def load_embed_and_head(config: KimiModelConfig, loader: WeightLoader) -> EmbedAndHead:
    """This rank's slices of the target's vocabulary matrices: for the target, or for a draft in another process."""
    shape = (config.vocab_size, config.hidden_size)
    embed = VocabParallelEmbedding.load(loader, "model.embed_tokens", *shape)
    return EmbedAndHead(embed, ParallelHead.load(loader, "lm_head", *shape))
