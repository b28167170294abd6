"""The EAGLE3 draft with Llama's attention (`LlamaForCausalLMEagle3`); tensors as in `models.eagle3_draft`."""

import torch

from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.config.draft_config import Eagle3MhaDraftConfig
from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.layers.mha import MhaAttention
from kimi_backend.layers.rotary import cos_sin_table
from kimi_backend.models.eagle3_draft import Eagle3Draft, draft_loader
from kimi_backend.parallel import TensorParallelGroup
from kimi_kernels.attention_batch import AttentionMetadata
from kimi_kernels.kernel_set import KernelSet


class Eagle3MhaDraft(Eagle3Draft):
    """A draft that caches keys and values of this rank's heads."""

    def __init__(
        self,
        config: Eagle3MhaDraftConfig,
        source: TensorSource,
        kernels: KernelSet,
        group: TensorParallelGroup,
        device: torch.device,
        dtype: torch.dtype,
        linear_format: LinearFormat = LinearFormat.NONE,
        head_format: LinearFormat | None = None,
    ) -> None:
        super().__init__(config, source, kernels, group, device, dtype, linear_format, head_format)
        self._config = config
        loader = draft_loader(config, source, self._kernels, group, device, dtype)
        cos_sin = cos_sin_table(config.head_dim, config.max_position_embeddings, config.rope, device)
        self._attentions = [
            MhaAttention(loader.scoped(f"layers.{index}.self_attn"), config, cos_sin, input_size=input_size)
            for index, input_size in enumerate(self._input_sizes)
        ]

    @property
    def config(self) -> Eagle3MhaDraftConfig:
        return self._config

    @property
    def num_mla_heads(self) -> None:
        return None

    def kv_pool_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """[2 * num_hidden_layers, num_blocks, block_size, num_key_value_heads of this rank, head_dim]."""
        num_kv_heads = self._config.num_key_value_heads // self._group.size
        return (2 * self._config.num_hidden_layers, num_blocks, block_size, num_kv_heads, self._config.head_dim)

    def _attend(
        self, layer: int, x: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor, kv_scale: float
    ) -> torch.Tensor:
        return self._attentions[layer](x, metadata, kv_cache[2 * layer : 2 * layer + 2], kv_scale)
