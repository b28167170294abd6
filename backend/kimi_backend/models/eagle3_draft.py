"""EAGLE3 and EAGLE3.1 drafts (Li et al. 2025, arXiv 2503.01840; 3.1: arXiv 2605.09992): all but the attention.

H the draft's hidden size, Ht the target's, C aux chunks, layer prefix `layers.0.` or `midlayer.`.

| tensor | shape | meaning |
|---|---|---|
| embed_tokens.weight | [vocab_size, H] | shared with the target where absent or bit-equal |
| fc.weight | [H, C * Ht] | fuses the target's aux hidden states |
| fc_norm.I.weight, 3.1 only | [Ht] | norm of aux chunk I before fc |
| layers.0.input_layernorm.weight | [H] | norm of the token embedding |
| layers.0.hidden_norm.weight | [H] | norm of the fused or fed-back hidden state |
| layers.0.self_attn.* | reads 2 * H | see `layers.mla`, `layers.mha` |
| layers.0.post_attention_layernorm.weight | [H] | |
| layers.0.mlp.* | | see `layers.mlp` |
| norm.weight | [H] | final norm |
| lm_head.weight | [draft_vocab_size, H] | shared with the target where absent or bit-equal |
| d2t, t2d | | see `models.vocabulary` |
"""

from abc import ABC, abstractmethod
from dataclasses import replace

import torch

from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.config.draft_config import Eagle3DraftConfig
from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.errors import CheckpointError
from kimi_backend.layers.embedding import ParallelHead, VocabParallelEmbedding
from kimi_backend.layers.linear import ColumnParallelLinear
from kimi_backend.layers.load_quantization import quantizing_kernels
from kimi_backend.layers.mlp import DenseMlp
from kimi_backend.layers.weight_loader import WeightLoader
from kimi_backend.models.kimi_k25 import EmbedAndHead
from kimi_backend.models.vocabulary import load_vocabulary_map
from kimi_backend.parallel import TensorParallelGroup
from kimi_kernels.attention_batch import AttentionMetadata
from kimi_kernels.kernel_set import KernelSet


class Eagle3Draft(ABC):
    """One decoder layer that reads [embedding of the next token ; hidden state] and predicts the token after it."""

    def __init__(
        self,
        config: Eagle3DraftConfig,
        source: TensorSource,
        kernels: KernelSet,
        group: TensorParallelGroup,
        device: torch.device,
        dtype: torch.dtype,
        linear_format: LinearFormat = LinearFormat.NONE,
        head_format: LinearFormat | None = None,
    ) -> None:
        """
        Args:
            source: the draft's checkpoint; this rank reads only its slices.
            linear_format: what linear layers are rounded to.
            head_format: what the head is rounded to; None takes `linear_format`.
        Raises:
            CheckpointError: a tensor is missing or misshapen, the vocabulary map is wrong, or the ranks cannot divide
                a width.
        """
        self._head_format = linear_format if head_format is None else head_format
        self._head_kernels = quantizing_kernels(kernels, self._head_format)
        kernels = quantizing_kernels(kernels, linear_format)
        loader = WeightLoader(source, kernels, group, device, dtype)
        _refuse_more_layers(source)
        layer = draft_layer_loader(loader)
        hidden = config.hidden_size
        self._kernels = kernels
        self._group = group
        self._eps = config.rms_norm_eps
        self._norm_output = config.norm_output
        self._norm_before_residual = config.norm_before_residual
        self._embed: VocabParallelEmbedding | None = None
        self._head: ParallelHead | None = None
        # The head first: what rounding it needs for a moment is free again before the rest comes.
        if loader.has("lm_head.weight"):
            head_loader = replace(loader, kernels=self._head_kernels)
            self._head = ParallelHead.load(
                head_loader, "lm_head", config.draft_vocab_size, hidden, keeps_weight=self._shares_head
            )
        self._fc_norm = _load_fc_norm(loader, config)
        aux_width = config.num_aux_hidden_states * config.target_hidden_size
        self._fc = ColumnParallelLinear.load(loader, [("fc", (hidden, aux_width))])
        self._input_norm = layer.vector("input_layernorm.weight", hidden)
        self._hidden_norm = layer.vector("hidden_norm.weight", hidden)
        self._post_norm = layer.vector("post_attention_layernorm.weight", hidden)
        self._mlp = DenseMlp(layer.scoped("mlp"), hidden, config.intermediate_size)
        self._norm = loader.vector("norm.weight", hidden)
        if loader.has("embed_tokens.weight"):
            self._embed = VocabParallelEmbedding.load(loader, "embed_tokens", config.vocab_size, hidden)
        self.vocabulary_map = load_vocabulary_map(source, config.draft_vocab_size, config.vocab_size, device)

    @property
    @abstractmethod
    def config(self) -> Eagle3DraftConfig: ...

    @property
    @abstractmethod
    def num_mla_heads(self) -> int | None:
        """Heads of this rank that `KernelSet.plan_mla_decode` plans for; None where the attention is not MLA."""

    @abstractmethod
    def kv_pool_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Of the cache that `forward` takes."""

    @abstractmethod
    def _attend(
        self, x: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor, kv_scale: float
    ) -> torch.Tensor:
        """x: [T, 2 * H] -> [T, H] on every rank."""

    def combine_aux(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Fuse what the target captured: [T, C * Ht] -> [T, H]. Once for each row that comes from the target."""
        if self._fc_norm is not None:
            aux_hidden_states = self._kernels.chunked_rms_norm(aux_hidden_states, self._fc_norm, self._eps)
        return self._fc.gathered(aux_hidden_states)

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,
        kv_scale: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer over one step's rows; row p pairs the hidden state at position p with the token at p + 1.

        Args:
            token_ids: [T] int32 or int64, of the target's vocabulary.
            hidden: [T, H], from `combine_aux`, or fed back from the row before.
            kv_cache: of `kv_pool_shape`, written in place.
        Returns:
            normed: [T, H], for `compute_logits`: never normed again.
            feedback: [T, H], the `hidden` of the next row: before the final norm, or after it with `norm_output`.
        """
        if self._embed is None:
            raise CheckpointError("embed_tokens.weight", ["the draft's file lacks it; set_embed_and_head first"])
        normed_pair = self._kernels.concat_rms_norm(
            self._embed(token_ids), self._input_norm, hidden, self._hidden_norm, self._eps
        )
        residual = normed_pair[:, hidden.shape[1] :] if self._norm_before_residual else hidden
        attended = self._attend(normed_pair, metadata, kv_cache, kv_scale)
        normed, residual = self._kernels.add_rms_norm(attended, residual, self._post_norm, self._eps)
        normed, residual = self._kernels.add_rms_norm(self._mlp(normed), residual, self._norm, self._eps)
        return normed, normed if self._norm_output else residual

    def compute_logits(self, normed: torch.Tensor) -> torch.Tensor:
        """normed: [R, H] -> [R, draft_vocab_size] of its dtype on every rank; columns as `vocabulary_map`
        says."""
        return self._loaded_head().logits(normed)

    def argmax(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely token of each row without gathering logits over ranks.

        Returns:
            values: [R] float32, the largest logit, NaN where the row has one.
            token_ids: [R] int64, of the target's vocabulary, lowest among equals; meaningless where the value is NaN.
        """
        values, columns = self._loaded_head().argmax(normed)
        if self.vocabulary_map is None:
            return values, columns
        last = self.config.draft_vocab_size - 1
        return values, self.vocabulary_map.token_id_of_column[columns.clamp(0, last)]

    def set_embed_and_head(self, target: EmbedAndHead) -> None:
        """Use the target's matrices in place of those that the file lacks or that are bit-equal.

        A draft whose head is rounded rounds a copy of the target's where it has none, and keeps its own otherwise.

        Raises:
            CheckpointError: the file lacks a matrix and the target's has another shape.
        """
        shape = (self.config.vocab_size // self._group.size, self.config.hidden_size)
        if self._embed is None or torch.equal(self._embed.weight, target.embed.weight):
            _check_shared("embed_tokens.weight", tuple(target.embed.weight.shape), shape)
            self._embed = target.embed
        self._share_head(target.head)

    def _share_head(self, head: ParallelHead) -> None:
        assert head.weight is not None, "a target keeps its head's weight"
        own = self._head.weight if self._head is not None else None
        if self._head is None or (own is not None and torch.equal(own, head.weight)):
            shape = (self.config.draft_vocab_size // self._group.size, self.config.hidden_size)
            _check_shared("lm_head.weight", tuple(head.weight.shape), shape)
            shares = self._shares_head
            self._head = (
                head if shares else ParallelHead(head.weight, self._head_kernels, self._group, keeps_weight=False)
            )

    def get_embed_and_head(self) -> EmbedAndHead:
        """This rank's slices, its own or the target's."""
        if self._embed is None:
            raise CheckpointError("embed_tokens.weight", ["the draft's file lacks it; set_embed_and_head first"])
        return EmbedAndHead(self._embed, self._loaded_head())

    @property
    def _shares_head(self) -> bool:
        """A head in the target's format may be the target's."""
        return self._head_format is LinearFormat.NONE

    def _loaded_head(self) -> ParallelHead:
        if self._head is None:
            raise CheckpointError("lm_head.weight", ["the draft's file lacks it; set_embed_and_head first"])
        return self._head


def draft_layer_loader(loader: WeightLoader) -> WeightLoader:
    """A loader of the one layer, under either of its names."""
    return loader.scoped("midlayer" if loader.has("midlayer.input_layernorm.weight") else "layers.0")


def _check_shared(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(
            name, [f"the draft's file lacks it, and the target's slice is {list(found)}, expected {list(expected)}"]
        )


def _load_fc_norm(loader: WeightLoader, config: Eagle3DraftConfig) -> torch.Tensor | None:
    """[C, Ht], or None where aux hidden states go into fc as they are."""
    if not config.fc_norm:
        return None
    chunks = range(config.num_aux_hidden_states)
    return torch.stack([loader.vector(f"fc_norm.{chunk}.weight", config.target_hidden_size) for chunk in chunks])


def _refuse_more_layers(source: TensorSource) -> None:
    more = sorted(name for name in source.names() if name.startswith("layers.") and not name.startswith("layers.0."))
    if more:
        raise CheckpointError("draft checkpoint", [f"{more[0]}: a draft of one layer is expected, found a second"])
