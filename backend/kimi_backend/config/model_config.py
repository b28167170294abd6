"""`KimiModelConfig`: the target's config.json, parsed once, checked, frozen."""

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path

from kimi_backend.config.json_fields import JsonFields, JsonObject, JsonSource, describe_source, load_json_object
from kimi_backend.config.known_fields import account_for_target
from kimi_backend.config.mla_dims import MlaDims, kv_item_bytes, read_q_lora_rank, read_rope_head_dim
from kimi_backend.config.quantization_config import QuantizationConfig, QuantizationMethod, StoredFormat
from kimi_backend.config.read_quantization import read_quantization
from kimi_backend.config.rope_config import RopeConfig
from kimi_backend.errors import ConfigError

MULTIMODAL_ARCHITECTURE = "KimiK25ForConditionalGeneration"
TEXT_ARCHITECTURE = "DeepseekV3ForCausalLM"
TEXT_ARCHITECTURES = (TEXT_ARCHITECTURE, "KimiK2ForCausalLM")
ARCHITECTURES = (MULTIMODAL_ARCHITECTURE, *TEXT_ARCHITECTURES)
MULTIMODAL_MODEL_TYPE = "kimi_k25"
TEXT_MODEL_TYPES = ("kimi_k2", "deepseek_v3")
DTYPES = ("bfloat16", "float16", "float32")
MAX_LAYERS = 1000
"""Well above any model. A number beyond it is a damaged file, whose list of tensors would fill the memory."""
MAX_EXPERTS = 10_000
"""The most experts of one layer, for the reason of MAX_LAYERS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiModelConfig(MlaDims):
    """The text model of Kimi-K2, K2-Thinking, K2.5, K2.6 (DeepSeek-V3's layout). Names are those of the file."""

    architecture: str
    """MULTIMODAL_ARCHITECTURE, whose weights lie under `language_model.`, or TEXT_ARCHITECTURE in any spelling."""
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    """The width of the dense layers."""
    moe_intermediate_size: int
    """The width of one expert."""
    n_routed_experts: int
    n_shared_experts: int
    """The shared expert's width is n_shared_experts * moe_intermediate_size; 0 means there is none."""
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_k_dense_replace: int
    moe_layer_freq: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    num_nextn_predict_layers: int
    """Layers after the last one that belong to a built-in draft; their weights are skipped."""
    eos_token_ids: tuple[int, ...]
    """The ids of config.json and generation_config.json together."""
    bos_token_id: int | None
    pad_token_id: int | None
    dtype: str
    """torch's name of the dtype that weights which are not quantised were saved in."""
    quantization: QuantizationConfig
    warnings: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """The warnings that the user must be told about the file."""

    @classmethod
    def from_hf_json(cls, source: JsonSource, generation_config: JsonSource | None = None) -> "KimiModelConfig":
        """Parse a target's config.json.

        Args:
            source: parsed JSON, a config.json, or a checkpoint folder.
            generation_config: likewise; by default the generation_config.json beside config.json, if there is one.
        Raises:
            ConfigError: a field is missing, of the wrong type, contradictory or unsupported.
        """
        top = JsonFields(load_json_object(source), describe_source(source, "config.json"))
        generation = JsonFields(_load_generation_config(source, generation_config), "generation_config.json")
        architecture, text = _text_fields(top)
        config = _build(cls, architecture, top, text, generation)
        account_for_target(top)
        _check_experts(config, text)
        _check_quantized_modules(config, text.path)
        return replace(config, warnings=tuple(top.warnings))

    def is_moe_layer(self, layer: int) -> bool:
        """Tell whether the layer has routed experts rather than a dense MLP."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def num_moe_layers(self) -> int:
        return sum(self.is_moe_layer(layer) for layer in range(self.num_hidden_layers))

    @property
    def expert_format(self) -> StoredFormat:
        """The format of the routed experts: all alike, which the parser checks. Without any, what dense layers are."""
        moe_layers = (layer for layer in range(self.num_hidden_layers) if self.is_moe_layer(layer))
        layer = next(moe_layers, None)
        if layer is None:
            return self.quantization.default
        return self.quantization.stored(f"model.layers.{layer}.mlp.experts.0.gate_proj")

    def kv_bytes_per_token(self, kv_cache_dtype: str = "bfloat16") -> int:
        """Bytes that one token's latents take in all layers; the same on every tensor-parallel rank."""
        return self.num_hidden_layers * self.latent_dim * kv_item_bytes(kv_cache_dtype)


def _load_generation_config(source: JsonSource, generation_config: JsonSource | None) -> JsonObject:
    if generation_config is not None:
        return load_json_object(generation_config, "generation_config.json")
    if not isinstance(source, str | Path):
        return {}
    path = Path(source)
    path = (path if path.is_dir() else path.parent) / "generation_config.json"
    return load_json_object(path, path.name) if path.exists() else {}


def _text_fields(top: JsonFields) -> tuple[str, JsonFields]:
    """The architecture, and the object that holds the text model's fields."""
    names = top.strings("architectures")
    if len(names) > 1 or (names and names[0] not in ARCHITECTURES):
        raise top.error("architectures", " or ".join(repr([name]) for name in ARCHITECTURES))
    model_type = top.choice("model_type", (MULTIMODAL_MODEL_TYPE, *TEXT_MODEL_TYPES))
    architecture = MULTIMODAL_ARCHITECTURE if model_type == MULTIMODAL_MODEL_TYPE else TEXT_ARCHITECTURE
    spellings = TEXT_ARCHITECTURES if architecture == TEXT_ARCHITECTURE else (architecture,)
    if names and names[0] not in spellings:
        raise top.error("architectures", f"[{architecture!r}], which model_type {model_type!r} means")
    if architecture == TEXT_ARCHITECTURE:
        return architecture, top
    text = top.object("text_config")
    if text is None:
        raise top.error("text_config", "an object")
    text.choice("model_type", TEXT_MODEL_TYPES, TEXT_MODEL_TYPES[0])
    return architecture, text


def _build(
    cls: type[KimiModelConfig], architecture: str, top: JsonFields, text: JsonFields, generation: JsonFields
) -> KimiModelConfig:
    text.optional_integer("num_key_value_heads")  # without meaning for MLA
    vocab_size = text.integer("vocab_size")
    last_token = vocab_size - 1
    tokens = text if text.has("eos_token_id") else top
    eos_token_ids = dict.fromkeys(
        (
            *tokens.integers("eos_token_id", maximum=last_token),
            *generation.integers("eos_token_id", maximum=last_token),
        )
    )
    num_layers = text.integer("num_hidden_layers", maximum=MAX_LAYERS)
    first_dense = text.integer("first_k_dense_replace", minimum=0, maximum=num_layers)
    return cls(
        architecture=architecture,
        hidden_size=text.integer("hidden_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=text.integer("num_attention_heads"),
        q_lora_rank=read_q_lora_rank(text),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=read_rope_head_dim(text),
        v_head_dim=text.integer("v_head_dim"),
        rope=RopeConfig.from_fields(text, interleaved=True),
        intermediate_size=text.integer("intermediate_size"),
        moe_intermediate_size=text.integer("moe_intermediate_size"),
        n_routed_experts=text.integer("n_routed_experts", maximum=MAX_EXPERTS),
        n_shared_experts=text.integer("n_shared_experts", 0, minimum=0),
        num_experts_per_tok=text.integer("num_experts_per_tok"),
        n_group=text.integer("n_group", 1),
        topk_group=text.integer("topk_group", 1),
        norm_topk_prob=text.boolean("norm_topk_prob", True),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        first_k_dense_replace=first_dense,
        moe_layer_freq=text.integer("moe_layer_freq", 1),
        rms_norm_eps=text.number("rms_norm_eps"),
        vocab_size=vocab_size,
        max_position_embeddings=text.integer("max_position_embeddings"),
        num_nextn_predict_layers=text.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MAX_LAYERS),
        eos_token_ids=tuple(eos_token_ids),
        bos_token_id=_token_id("bos_token_id", top, text, last_token),
        pad_token_id=_token_id("pad_token_id", top, text, last_token),
        dtype=read_dtype(top, text),
        quantization=read_quantization(_quantization_fields(top, text)),
    )


def _token_id(field: str, top: JsonFields, text: JsonFields, last_token: int) -> int | None:
    fields = text if text.has(field) else top
    return fields.optional_integer(field, 0, last_token)


def read_dtype(*objects: JsonFields) -> str:
    """The first `dtype` or `torch_dtype` that the objects give; bfloat16 when none does."""
    for field in ("dtype", "torch_dtype"):
        for fields in reversed(objects):
            if fields.has(field):
                return fields.choice(field, DTYPES)
    return DTYPES[0]


def _quantization_fields(top: JsonFields, text: JsonFields) -> JsonFields | None:
    if text.value("quantization_config") == top.value("quantization_config"):
        return text.object("quantization_config")
    if text.has("quantization_config") and top.has("quantization_config"):
        raise ConfigError(
            f"{text.path} quantization_config contradicts {top.path} quantization_config:"
            " expected one, or two that are equal"
        )
    return text.object("quantization_config") or top.object("quantization_config")


def _check_experts(config: KimiModelConfig, text: JsonFields) -> None:
    """The router's numbers must allow num_experts_per_tok different experts."""
    if config.n_routed_experts % config.n_group:
        raise text.error("n_group", f"a divisor of n_routed_experts ({config.n_routed_experts})")
    if config.topk_group > config.n_group:
        raise text.error("topk_group", f"at most n_group ({config.n_group})")
    group_experts = config.n_routed_experts // config.n_group
    if config.n_group > 1 and group_experts < 2:
        raise text.error("n_group", "groups of at least 2 experts (a group's score is the sum of its two best)")
    if config.num_experts_per_tok > config.topk_group * group_experts:
        raise text.error(
            "num_experts_per_tok", f"at most the {config.topk_group * group_experts} experts to choose from"
        )


def _check_quantized_modules(config: KimiModelConfig, path: str) -> None:
    """Kernels read quantised experts only, all or none; fp8 and mxfp4 elsewhere are dequantised at load, int4 is
    not."""
    quantization, expert = config.quantization, config.expert_format
    if all(stored.method is QuantizationMethod.NONE for stored in quantization.formats):
        return
    _check_expert_format(config, path)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        if config.is_moe_layer(layer):
            for number in (0, config.n_routed_experts - 1):
                for projection in ("gate_proj", "up_proj", "down_proj"):
                    module = f"{prefix}.mlp.experts.{number}.{projection}"
                    stored = quantization.stored(module)
                    if stored.method is QuantizationMethod.NONE:
                        raise ConfigError(
                            f"{path}: quantization_config (targets, ignore) leaves {module} as it is,"
                            " expected all routed experts quantised"
                        )
                    if stored != expert:
                        raise ConfigError(
                            f"{path}: quantization_config stores {module} as {stored.describe()},"
                            f" expected all routed experts as {expert.describe()}"
                        )
        if any(stored.method is QuantizationMethod.INT4 for stored in quantization.formats):
            _refuse_other_int4(config, prefix, layer, path)


def _check_expert_format(config: KimiModelConfig, path: str) -> None:
    """Gate and up are stacked, so a block of theirs must end where the matrix ends."""
    stored = config.expert_format
    if config.num_moe_layers and stored.method is QuantizationMethod.FP8 and not stored.block_size:
        raise ConfigError(
            f"{path}: quantization_config stores routed experts as {stored.describe()}, expected fp8 in square blocks"
            " (another takes expert kernels that scale rows)"
        )
    in_groups = stored.group_size > 0
    unit = stored.group_size or stored.block_size or 1
    name = f"{stored.method.value} group_size" if in_groups else "fp8 weight_block_size"
    checked = [("hidden_size", config.hidden_size)] if in_groups else []
    if in_groups or config.num_moe_layers:
        checked.append(("moe_intermediate_size", config.moe_intermediate_size))
    for field, width in checked:
        if width % unit:
            raise ConfigError(f"{path}: {field} is {width}, expected a multiple of the {name} {unit}")


def _refuse_other_int4(config: KimiModelConfig, prefix: str, layer: int, path: str) -> None:
    queries = ("q_proj",) if config.q_lora_rank is None else ("q_a_proj", "q_b_proj")
    attention = (*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    mlp = "mlp.shared_experts" if config.is_moe_layer(layer) else "mlp"
    modules = [f"{prefix}.self_attn.{name}" for name in attention]
    if not config.is_moe_layer(layer) or config.n_shared_experts:
        modules += [f"{prefix}.{mlp}.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    for module in modules:
        if config.quantization.stored(module).method is QuantizationMethod.INT4:
            raise ConfigError(
                f"{path}: quantization_config quantises {module} to int4, expected routed experts only"
                " (add the module to ignore)"
            )
