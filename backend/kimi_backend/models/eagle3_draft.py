"""EAGLE3 and EAGLE3.1 drafts (Li et al. 2025, arXiv 2503.01840; 3.1: arXiv 2605.09992): all but the attention.

H the draft's hidden size, Ht the target's, C aux chunks; names are canonical (`checkpoint.canonical_tensors`).

| tensor | shape | meaning |
|---|---|---|
| embed_tokens.weight | [vocab_size, H] | shared with the target where absent or bit-equal |
| fc.weight | [H, C * Ht] | fuses the target's aux hidden states |
| fc_norm.I.weight, 3.1 only | [Ht] | norm of aux chunk I before fc |
| input_norm.weight, only with norm_before_fc | [C * Ht] | norm of all aux chunks before fc |
| layers.0.input_layernorm.weight | [H] | norm of the token embedding |
| layers.0.hidden_norm.weight | [H] | norm of the fused or fed-back hidden state |
| layers.0.self_attn.* | reads 2 * H | see `layers.mla`, `layers.mha` |
| layers.0.post_attention_layernorm.weight | [H] | |
| layers.0.mlp.* | | see `layers.mlp` |
| norm.weight | [H] | final norm |
| lm_head.weight | [draft_vocab_size, H] | shared with the target where absent or bit-equal |
| d2t, t2d | | see `checkpoint.vocabulary_map` |

A linear layer and a norm may have a bias. A draft of several layers has `layers.1.` and so on, which read the residual
stream alone: they have no hidden_norm, and their attention reads H.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
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
from kimi_backend.layers.norm import RmsNorm
from kimi_backend.layers.residual import RankTerms
from kimi_backend.layers.weight_loader import WeightLoader
from kimi_backend.models.kimi_k25 import EmbedAndHead
from kimi_backend.models.vocabulary import load_vocabulary_map
from kimi_backend.parallel import TensorParallelGroup
from kimi_kernels.attention_batch import AttentionMetadata
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.weights import FP8_BLOCK_SIZE


class Eagle3Draft(ABC):
    """Decoder layers, of which the first reads [embedding of the next token ; hidden state], that predict the token
    after it."""

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
        loader = draft_loader(config, source, kernels, group, device, dtype)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._kernels = kernels
        self._group = group
        self._eps = eps
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
        aux_width = config.num_aux_hidden_states * config.target_hidden_size
        self._fc_norm, self._fc_norm_bias = _load_fc_norm(loader, config)
        self._norm_before_fc = RmsNorm(loader, "input_norm", aux_width, eps) if config.norm_before_fc else None
        self._fc = ColumnParallelLinear.load(loader, [("fc", (hidden, aux_width))])
        layers = [loader.scoped(f"layers.{index}") for index in range(config.num_hidden_layers)]
        self._hidden_norm = RmsNorm(layers[0], "hidden_norm", hidden, eps)
        self._input_norms = [RmsNorm(layer, "input_layernorm", hidden, eps) for layer in layers]
        self._post_norms = [RmsNorm(layer, "post_attention_layernorm", hidden, eps) for layer in layers]
        self._mlps = [DenseMlp(layer.scoped("mlp"), hidden, config.intermediate_size) for layer in layers]
        self._norm = RmsNorm(loader, "norm", hidden, eps)
        pair = (self._input_norms[0], self._hidden_norm)
        self._pair_bias = _side_by_side([norm.bias for norm in pair], [norm.weight for norm in pair])
        self._input_sizes = [2 * hidden] + [hidden] * (config.num_hidden_layers - 1)
        """Width of the rows that each layer's attention reads."""
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
        """Return the shape of the cache that `forward` takes."""

    @abstractmethod
    def _attend(
        self, layer: int, x: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor, kv_scale: float
    ) -> torch.Tensor:
        """x: [T, 2 * H], of later layers [T, H] -> this rank's term of the sum over ranks, [T, H]."""

    def combine_aux(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Fuse what the target captured: [T, C * Ht] -> [T, H]. Once for each row that comes from the target."""
        if self._fc_norm is not None:
            aux_hidden_states = self._kernels.chunked_rms_norm(aux_hidden_states, self._fc_norm, self._eps)
            if self._fc_norm_bias is not None:
                aux_hidden_states = aux_hidden_states + self._fc_norm_bias
        if self._norm_before_fc is not None:
            aux_hidden_states = self._norm_before_fc(aux_hidden_states)
        return self._fc.gathered(aux_hidden_states)

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,
        kv_scale: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers over one step's rows; row p pairs the hidden state at position p with the token at p + 1.

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
        attention_input, residual = self._first_input(self._embed(token_ids), hidden)
        for layer, (post_norm, mlp) in enumerate(zip(self._post_norms, self._mlps, strict=True)):
            attended = self._attend(layer, attention_input, metadata, kv_cache, kv_scale)
            normed, residual = post_norm.add(RankTerms(attended), residual)
            is_last = layer + 1 == len(self._mlps)
            following = self._norm if is_last else self._input_norms[layer + 1]
            attention_input, residual = following.add(RankTerms(mlp(normed)), residual)
        normed = attention_input
        return normed, normed if self._norm_output else residual

    def _first_input(self, embedding: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the input of the first layer's attention, [T, 2 * H], and the residual that it adds to, [T, H]."""
        norm, hidden_norm = self._input_norms[0], self._hidden_norm
        pair = self._kernels.concat_rms_norm(embedding, norm.weight, hidden, hidden_norm.weight, self._eps)
        if self._pair_bias is not None:
            pair = pair + self._pair_bias
        return pair, pair[:, hidden.shape[1] :] if self._norm_before_residual else hidden

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


def draft_loader(
    config: Eagle3DraftConfig,
    source: TensorSource,
    kernels: KernelSet,
    group: TensorParallelGroup,
    device: torch.device,
    dtype: torch.dtype,
) -> WeightLoader:
    """A loader that knows the size of the file's fp8 blocks."""
    block_size = config.quantization.fp8_block_size or FP8_BLOCK_SIZE
    return WeightLoader(source, kernels, group, device, dtype, fp8_block_size=block_size)


def _check_shared(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(
            name, [f"the draft's file lacks it, and the target's slice is {list(found)}, expected {list(expected)}"]
        )


def _load_fc_norm(loader: WeightLoader, config: Eagle3DraftConfig) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Weights [C, Ht] and biases [C * Ht]; None where there are none."""
    if not config.fc_norm:
        return None, None
    width, chunks = config.target_hidden_size, range(config.num_aux_hidden_states)
    weights = [loader.vector(f"fc_norm.{chunk}.weight", width) for chunk in chunks]
    biases = [loader.optional_vector(f"fc_norm.{chunk}.bias", width) for chunk in chunks]
    return torch.stack(weights), _side_by_side(biases, weights)


def _side_by_side(biases: Sequence[torch.Tensor | None], likes: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Biases one after the other, 0 where one is missing; None where all are."""
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [torch.zeros_like(like) if bias is None else bias for bias, like in zip(biases, likes, strict=True)]
    )
