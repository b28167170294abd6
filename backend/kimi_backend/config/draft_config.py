"""`Eagle3DraftConfig`: an EAGLE3 or EAGLE3.1 draft's config.json, parsed once against its target, checked, frozen."""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from kimi_backend.config.draft_fields import DraftAttention, DraftFields
from kimi_backend.config.json_fields import JsonFields, JsonSource, describe_source, load_json_object
from kimi_backend.config.known_fields import account_for_draft
from kimi_backend.config.mla_dims import MlaDims, kv_item_bytes, read_q_lora_rank, read_rope_head_dim
from kimi_backend.config.model_config import KimiModelConfig, read_dtype
from kimi_backend.config.quantization_config import QuantizationConfig
from kimi_backend.config.rope_config import RopeConfig
from kimi_backend.errors import ConfigError

MAX_DRAFT_LAYERS = 16
"""Well above any draft; a number beyond it is a damaged file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOverrides:
    """The operator's settings against a draft's config.json; None leaves the file's value."""

    rope_theta: float | None = None
    beta_fast: float | None = None
    interleaved: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    """Explicit R(j), see `config.aux_layers`."""

    def __post_init__(self) -> None:
        for field, least in (("rope_theta", 1.0), ("beta_fast", 0.0)):
            value = getattr(self, field)
            if value is not None and not (_is_number(value) and value > least):
                raise ConfigError(f"draft override {field} is {value!r}, expected a finite number above {least:g}")
        for field in ("interleaved", "fc_norm", "norm_output"):
            value = getattr(self, field)
            if value is not None and not isinstance(value, bool):
                raise ConfigError(f"draft override {field} is {value!r}, expected true or false")
        ids = self.aux_layer_ids
        if ids is not None and not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ConfigError(f"draft override aux_layer_ids is {ids!r}, expected integers")


NO_OVERRIDES = DraftOverrides()


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3DraftConfig(ABC):
    """The common part of both kinds of draft: dense decoder layers, of which the first one's attention reads
    [embedding; hidden].

    Names are those of the file, but for aux_layer_ids.
    """

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    rope: RopeConfig
    rms_norm_eps: float
    max_position_embeddings: int
    """The target's, which decides how long a sequence may be."""
    trained_positions: int | None
    """The file's own `max_position_embeddings`."""
    vocab_size: int
    """The target's."""
    draft_vocab_size: int
    """Rows of the draft's head; vocab_size when the file gives none. A head that the file lacks is the target's."""
    target_hidden_size: int
    """Width of one aux chunk."""
    aux_layer_ids: tuple[int, ...]
    """R(j) captured from the target; fc reads len(aux_layer_ids) * target_hidden_size."""
    fc_norm: bool
    """EAGLE3.1: each aux chunk gets its own RMSNorm before fc."""
    norm_before_fc: bool
    """One RMSNorm over all aux chunks side by side before fc; never beside fc_norm."""
    norm_output: bool
    """EAGLE3.1: the next step reads the normed hidden state, not the raw one."""
    norm_before_residual: bool
    """The residual stream starts from the normed hidden state, not from the raw one."""
    attention_bias: bool
    """The attention's projections have biases. Other biases are the draft's if they are in its file."""
    ties_head: bool
    """True if the file lacks a head, and the draft's embedding is it."""
    dtype: str
    quantization: QuantizationConfig
    """The quantization of the linear layers in the file."""
    aux_layer_rule: str = dataclasses.field(default="", compare=False)
    """The origin of aux_layer_ids, for the log."""
    warnings: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """The warnings that the user must be told about the file."""

    @staticmethod
    def from_hf_json(
        source: JsonSource, target: KimiModelConfig, overrides: DraftOverrides = NO_OVERRIDES
    ) -> "Eagle3MlaDraftConfig | Eagle3MhaDraftConfig":
        """Parse a draft's config.json.

        Args:
            source: parsed JSON, a config.json, or a checkpoint folder.
            target: the model that the draft drafts for.
            overrides: settings that win over the file.
        Raises:
            ConfigError: a field is missing, of the wrong type, unsupported, or does not fit the target.
        """
        top = JsonFields(load_json_object(source), describe_source(source, "draft config.json"))
        fields = DraftFields.of(top)
        is_mla = fields.attention is DraftAttention.MLA
        config = _read_mla(fields, target, overrides) if is_mla else _read_mha(fields, target, overrides)
        account_for_draft(top)
        return replace(config, warnings=tuple(top.warnings))

    @property
    def num_aux_hidden_states(self) -> int:
        return len(self.aux_layer_ids)

    @abstractmethod
    def kv_bytes_per_token(self, kv_cache_dtype: str = "bfloat16", tp_size: int = 1) -> int:
        """Bytes that one token takes in the draft's cache on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3MlaDraftConfig(Eagle3DraftConfig, MlaDims):
    """A draft whose attention is the target's kind (`Eagle3DeepseekV2ForCausalLM`)."""

    def kv_bytes_per_token(self, kv_cache_dtype: str = "bfloat16", tp_size: int = 1) -> int:
        """Bytes that one token's latents take in all layers; the same on every rank."""
        return self.num_hidden_layers * self.latent_dim * kv_item_bytes(kv_cache_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3MhaDraftConfig(Eagle3DraftConfig):
    """A draft with multi-head or grouped-query attention (`LlamaForCausalLMEagle3`)."""

    num_key_value_heads: int
    head_dim: int
    sliding_window: int | None
    """A row sees so many keys up to its own; None sees all."""

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    def kv_bytes_per_token(self, kv_cache_dtype: str = "bfloat16", tp_size: int = 1) -> int:
        """Bytes that one token's keys and values take on one rank, which holds its share of the heads."""
        local_heads = max(1, self.num_key_value_heads // tp_size)
        return self.num_hidden_layers * 2 * local_heads * self.head_dim * kv_item_bytes(kv_cache_dtype)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_rope(fields: JsonFields, overrides: DraftOverrides, *, interleaved: bool) -> RopeConfig:
    rope = RopeConfig.from_fields(fields, interleaved=interleaved)
    rope = replace(
        rope,
        theta=rope.theta if overrides.rope_theta is None else overrides.rope_theta,
        beta_fast=rope.beta_fast if overrides.beta_fast is None else overrides.beta_fast,
        interleaved=rope.interleaved if overrides.interleaved is None else overrides.interleaved,
    )
    if overrides.beta_fast is not None and not rope.is_yarn:
        raise ConfigError(
            f"draft override beta_fast is {overrides.beta_fast!r}, expected none: the draft's rope is not yarn"
        )
    if rope.is_yarn and rope.beta_slow > rope.beta_fast:
        raise ConfigError(
            f"draft override beta_fast is {rope.beta_fast:g}, expected at least beta_slow ({rope.beta_slow:g})"
        )
    return rope


def _read_shared(
    fields: DraftFields, target: KimiModelConfig, overrides: DraftOverrides, *, interleaved: bool
) -> dict[str, Any]:
    """The fields of `Eagle3DraftConfig`."""
    layer, holding = fields.layer, fields.holding("draft_vocab_size")
    vocab_size = layer.integer("vocab_size", target.vocab_size)
    if vocab_size != target.vocab_size:
        raise layer.error("vocab_size", f"{target.vocab_size}, the target's")
    fc_norm, norm_output = fields.fc_norm(), fields.boolean("norm_output", False)
    fc_norm = fc_norm if overrides.fc_norm is None else overrides.fc_norm
    norm_before_fc = fields.boolean("norm_before_fc", False)
    if norm_before_fc and fc_norm:
        raise fields.holding("norm_before_fc").error("norm_before_fc", "False beside fc_norm: one norm before fc")
    aux_layers = fields.aux_layers(target, overrides.aux_layer_ids)
    return {
        "hidden_size": layer.integer("hidden_size"),
        "num_hidden_layers": layer.integer("num_hidden_layers", 1, maximum=MAX_DRAFT_LAYERS),
        "intermediate_size": layer.integer("intermediate_size"),
        "num_attention_heads": layer.integer("num_attention_heads"),
        "rope": _read_rope(layer, overrides, interleaved=interleaved),
        "rms_norm_eps": layer.number("rms_norm_eps"),
        "max_position_embeddings": target.max_position_embeddings,
        "trained_positions": _read_trained_positions(layer, target),
        "vocab_size": vocab_size,
        "draft_vocab_size": holding.integer("draft_vocab_size", vocab_size, maximum=vocab_size),
        "target_hidden_size": fields.target_hidden_size(target),
        "aux_layer_ids": aux_layers.ids,
        "aux_layer_rule": aux_layers.rule,
        "fc_norm": fc_norm,
        "norm_before_fc": norm_before_fc,
        "norm_output": norm_output if overrides.norm_output is None else overrides.norm_output,
        "norm_before_residual": fields.norm_before_residual(),
        "attention_bias": layer.boolean("attention_bias", False),
        "ties_head": fields.boolean("tie_word_embeddings", layer.boolean("tie_word_embeddings", False)),
        "dtype": read_dtype(fields.top, layer),
        "quantization": fields.quantization(),
    }


def _read_trained_positions(layer: JsonFields, target: KimiModelConfig) -> int | None:
    positions, longest = layer.optional_integer("max_position_embeddings"), target.max_position_embeddings
    if positions is not None and positions < longest:
        layer.warn(
            f"max_position_embeddings is {positions}, the target's is {longest}: in longer sequences the draft is"
            " beyond what it was trained for, and fewer of its tokens may be accepted; the setting"
            f" draft_max_positions = {positions} stops drafting there"
        )
    return positions


def _read_mla(fields: DraftFields, target: KimiModelConfig, overrides: DraftOverrides) -> Eagle3MlaDraftConfig:
    layer = fields.layer
    return Eagle3MlaDraftConfig(
        **_read_shared(fields, target, overrides, interleaved=True),
        q_lora_rank=read_q_lora_rank(layer),
        kv_lora_rank=layer.integer("kv_lora_rank"),
        qk_nope_head_dim=layer.integer("qk_nope_head_dim"),
        qk_rope_head_dim=read_rope_head_dim(layer),
        v_head_dim=layer.integer("v_head_dim"),
    )


def _read_mha(fields: DraftFields, target: KimiModelConfig, overrides: DraftOverrides) -> Eagle3MhaDraftConfig:
    layer = fields.layer
    num_heads, hidden_size = layer.integer("num_attention_heads"), layer.integer("hidden_size")
    if not layer.has("head_dim") and hidden_size % num_heads:
        raise layer.error("num_attention_heads", f"a divisor of hidden_size ({hidden_size}), or a head_dim beside it")
    head_dim = layer.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise layer.error("head_dim", "an even integer")
    num_key_value_heads = layer.integer("num_key_value_heads", num_heads)
    if num_heads % num_key_value_heads:
        raise layer.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    shared = _read_shared(fields, target, overrides, interleaved=False)
    return Eagle3MhaDraftConfig(
        **shared,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        sliding_window=fields.sliding_window(shared["num_hidden_layers"]),
    )
