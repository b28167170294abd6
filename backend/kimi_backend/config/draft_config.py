"""`Eagle3DraftConfig`: an EAGLE3 or EAGLE3.1 draft's config.json, parsed once against its target, checked, frozen."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from kimi_backend.config.aux_layers import AUX_LAYER_IDS_FIELD, resolve_aux_layer_ids
from kimi_backend.config.json_fields import JsonFields, JsonSource, describe_source, load_json_object
from kimi_backend.config.mla_dims import MlaDims, kv_item_bytes, read_q_lora_rank, read_rope_head_dim
from kimi_backend.config.model_config import KimiModelConfig, read_dtype
from kimi_backend.config.rope_config import RopeConfig
from kimi_backend.errors import ConfigError

MLA_ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
MHA_ARCHITECTURE = "LlamaForCausalLMEagle3"
ARCHITECTURES = (MLA_ARCHITECTURE, MHA_ARCHITECTURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOverrides:
    """What an operator sets against a draft's config.json; None leaves the file's value."""

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
    """What both kinds of draft share: one dense decoder layer whose attention reads [embedding; hidden].

    Names are those of the file, but for aux_layer_ids.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    rope: RopeConfig
    rms_norm_eps: float
    max_position_embeddings: int
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
    norm_output: bool
    """EAGLE3.1: the next step reads the normed hidden state, not the raw one."""
    norm_before_residual: bool
    """The residual stream starts from the normed hidden state, not from the raw one."""
    dtype: str

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
        fields = JsonFields(load_json_object(source), describe_source(source, "draft config.json"))
        names = fields.strings("architectures")
        if len(names) != 1 or names[0] not in ARCHITECTURES:
            raise fields.error("architectures", " or ".join(repr([name]) for name in ARCHITECTURES))
        eagle = _EagleFields(fields, fields.object("eagle_config"))
        _refuse_unsupported(fields, eagle)
        if names[0] == MLA_ARCHITECTURE:
            return _read_mla(fields, eagle, target, overrides)
        return _read_mha(fields, eagle, target, overrides)

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
        """Bytes that one token's latent takes; the same on every rank."""
        return self.latent_dim * kv_item_bytes(kv_cache_dtype)


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
        return 2 * local_heads * self.head_dim * kv_item_bytes(kv_cache_dtype)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class _EagleFields:
    """Fields that stand in `eagle_config` or, in other exports, at the top level."""

    top: JsonFields
    nested: JsonFields | None

    def holding(self, field: str) -> JsonFields:
        if self.nested is None or not self.nested.has(field):
            return self.top
        if self.top.has(field) and self.top.data[field] != self.nested.data[field]:
            raise self.nested.error(field, f"{self.top.data[field]!r} as at the top level, or only one of the two")
        return self.nested

    def boolean(self, field: str, default: bool) -> bool:
        return self.holding(field).boolean(field, default)


def _refuse_unsupported(fields: JsonFields, eagle: _EagleFields) -> None:
    fields.integer("num_hidden_layers", 1, maximum=1)
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    fields.require("tie_word_embeddings", False)
    if fields.has("quantization_config"):
        raise fields.error("quantization_config", "none (drafts are served in the dtype of their file)")
    eagle.holding("use_aux_hidden_state").require("use_aux_hidden_state", True)
    eagle.holding("norm_before_fc").require("norm_before_fc", False)


def _read_fc_norm(eagle: _EagleFields) -> bool:
    """`fc_norm`, once called `use_aux_norm`."""
    legacy = eagle.boolean("use_aux_norm", False)
    fc_norm = eagle.boolean("fc_norm", legacy)
    if fc_norm != legacy and eagle.holding("use_aux_norm").has("use_aux_norm"):
        raise eagle.holding("fc_norm").error(
            "fc_norm", f"{legacy} as its older name use_aux_norm, or only one of the two"
        )
    return fc_norm


def _read_aux_layer_ids(eagle: _EagleFields, target: KimiModelConfig, overrides: DraftOverrides) -> tuple[int, ...]:
    fields = eagle.holding(AUX_LAYER_IDS_FIELD)
    ids = resolve_aux_layer_ids(fields, target.num_hidden_layers, overrides.aux_layer_ids)
    counted = eagle.holding("num_aux_hidden_states")
    if counted.integer("num_aux_hidden_states", len(ids)) != len(ids):
        raise counted.error("num_aux_hidden_states", f"{len(ids)}, the number of aux layers {list(ids)}")
    return ids


def _read_target_hidden_size(fields: JsonFields, eagle: _EagleFields, target: KimiModelConfig) -> int:
    holding = eagle.holding("target_hidden_size")
    field = "target_hidden_size" if holding.has("target_hidden_size") else "hidden_size"
    holding = holding if field == "target_hidden_size" else fields
    value = holding.integer(field)
    if value != target.hidden_size:
        hint = "" if field == "target_hidden_size" else "; a draft of another width says target_hidden_size"
        raise holding.error(field, f"{target.hidden_size}, the target's hidden_size{hint}")
    return value


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
    fields: JsonFields, eagle: _EagleFields, target: KimiModelConfig, overrides: DraftOverrides, *, interleaved: bool
) -> dict[str, Any]:
    """The fields of `Eagle3DraftConfig`."""
    vocab_size = fields.integer("vocab_size", target.vocab_size)
    if vocab_size != target.vocab_size:
        raise fields.error("vocab_size", f"{target.vocab_size}, the target's")
    fc_norm, norm_output = _read_fc_norm(eagle), eagle.boolean("norm_output", False)
    return {
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_attention_heads": fields.integer("num_attention_heads"),
        "rope": _read_rope(fields, overrides, interleaved=interleaved),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "vocab_size": vocab_size,
        "draft_vocab_size": fields.integer("draft_vocab_size", vocab_size, maximum=vocab_size),
        "target_hidden_size": _read_target_hidden_size(fields, eagle, target),
        "aux_layer_ids": _read_aux_layer_ids(eagle, target, overrides),
        "fc_norm": fc_norm if overrides.fc_norm is None else overrides.fc_norm,
        "norm_output": norm_output if overrides.norm_output is None else overrides.norm_output,
        "norm_before_residual": eagle.boolean("norm_before_residual", False),
        "dtype": read_dtype(fields),
    }


def _read_mla(
    fields: JsonFields, eagle: _EagleFields, target: KimiModelConfig, overrides: DraftOverrides
) -> Eagle3MlaDraftConfig:
    return Eagle3MlaDraftConfig(
        **_read_shared(fields, eagle, target, overrides, interleaved=True),
        q_lora_rank=read_q_lora_rank(fields),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=read_rope_head_dim(fields),
        v_head_dim=fields.integer("v_head_dim"),
    )


def _read_mha(
    fields: JsonFields, eagle: _EagleFields, target: KimiModelConfig, overrides: DraftOverrides
) -> Eagle3MhaDraftConfig:
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.error("num_attention_heads", f"a divisor of hidden_size ({hidden_size}), or a head_dim beside it")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", "an even integer")
    num_key_value_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_key_value_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    return Eagle3MhaDraftConfig(
        **_read_shared(fields, eagle, target, overrides, interleaved=False),
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        sliding_window=fields.optional_integer("sliding_window"),
    )
