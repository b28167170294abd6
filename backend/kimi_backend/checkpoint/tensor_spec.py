"""Every tensor a checkpoint must hold, from its config: the one list of names, shapes and dtypes.

The models read these names, `validation` compares files with them, `random_tensors` and `writer` make files from them.
Each model's own module explains what its tensors mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from kimi_backend.config.draft_config import (
    NO_OVERRIDES,
    DraftOverrides,
    Eagle3DraftConfig,
    Eagle3MhaDraftConfig,
    Eagle3MlaDraftConfig,
)
from kimi_backend.config.mla_dims import MlaDims
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.quantization_config import QuantizationConfig, QuantizationMethod

NIBBLES_PER_WORD = 8
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DRAFT_LAYER = "layers.0"


class TensorRole(Enum):
    """What a tensor is for, which says what sane values look like."""

    NORM = "norm weight"
    LINEAR = "matrix"
    EMBEDDING = "embedding"
    ROUTER_BIAS = "router's correction bias"
    INT4_CODES = "packed int4 codes"
    INT4_SCALES = "int4 group scales"
    INT4_SHAPE = "shape of an int4 matrix"
    FP8_VALUES = "fp8 values"
    FP8_SCALES = "fp8 block scales"
    DRAFT_TO_TARGET = "draft-to-target vocabulary offsets"
    TARGET_TO_DRAFT = "mask of target tokens that the draft knows"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a file must hold under one name."""

    role: TensorRole
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    """Allowed; the first is what `make-checkpoint` writes."""
    matrix_shape: tuple[int, int] | None = None
    """[out_features, in_features] of the matrix that a quantised tensor is part of."""
    is_required: bool = True

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtypes[0].itemsize

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


Specs = dict[str, TensorSpec]


def target_tensor_specs(config: KimiModelConfig) -> Specs:
    """All tensors of a target, without the `language_model.` prefix, in file order."""
    return dict(_target_specs(config))


def draft_tensor_specs(
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig, overrides: DraftOverrides = NO_OVERRIDES
) -> Specs:
    """All tensors of a draft, under their canonical names (`draft_names.canonical_draft_name`).

    Args:
        overrides: those that `config` was read with: norms that the operator switched off may stay in the file.
    """
    return dict(_draft_specs(config, overrides))


def _target_specs(config: KimiModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    yield "model.embed_tokens.weight", _embedding(config.dtype, config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        yield from _layer_specs(config, layer)
    yield "model.norm.weight", _norm(config.dtype, config.hidden_size)
    yield "lm_head.weight", _matrix(config.dtype, config.vocab_size, config.hidden_size)


def _layer_specs(config: KimiModelConfig, layer: int) -> Iterator[tuple[str, TensorSpec]]:
    prefix = f"model.layers.{layer}"
    linear = _LinearSpecs(config.dtype, config.quantization)
    yield f"{prefix}.input_layernorm.weight", _norm(config.dtype, config.hidden_size)
    yield from _mla_specs(f"{prefix}.self_attn", config, linear, config.hidden_size, config.hidden_size)
    yield f"{prefix}.post_attention_layernorm.weight", _norm(config.dtype, config.hidden_size)
    if not config.is_moe_layer(layer):
        yield from _mlp_specs(f"{prefix}.mlp", linear, config.hidden_size, config.intermediate_size)
        return
    num_experts, expert_width = config.n_routed_experts, config.moe_intermediate_size
    yield f"{prefix}.mlp.gate.weight", _matrix(config.dtype, num_experts, config.hidden_size)
    yield (
        f"{prefix}.mlp.gate.e_score_correction_bias",
        TensorSpec(
            role=TensorRole.ROUTER_BIAS,
            shape=(num_experts,),
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
        ),
    )
    # The config is checked to store all experts alike, so one stands for all: a large model has 200,000 of these.
    first = f"{prefix}.mlp.experts.0"
    an_expert = [
        (name.removeprefix(first), spec) for name, spec in _mlp_specs(first, linear, config.hidden_size, expert_width)
    ]
    for expert in range(num_experts):
        for suffix, spec in an_expert:
            yield f"{prefix}.mlp.experts.{expert}{suffix}", spec
    if config.n_shared_experts:
        shared_width = config.n_shared_experts * expert_width
        yield from _mlp_specs(f"{prefix}.mlp.shared_experts", linear, config.hidden_size, shared_width)


def _mla_specs(
    prefix: str, dims: MlaDims, linear: "_LinearSpecs", input_size: int, output_size: int
) -> Iterator[tuple[str, TensorSpec]]:
    num_heads = dims.num_attention_heads
    if dims.q_lora_rank is None:
        yield from linear.specs(f"{prefix}.q_proj", num_heads * dims.qk_head_dim, input_size)
    else:
        yield from linear.specs(f"{prefix}.q_a_proj", dims.q_lora_rank, input_size)
        yield f"{prefix}.q_a_layernorm.weight", _norm(linear.dtype, dims.q_lora_rank)
        yield from linear.specs(f"{prefix}.q_b_proj", num_heads * dims.qk_head_dim, dims.q_lora_rank)
    yield from linear.specs(f"{prefix}.kv_a_proj_with_mqa", dims.latent_dim, input_size)
    yield f"{prefix}.kv_a_layernorm.weight", _norm(linear.dtype, dims.kv_lora_rank)
    kv_rows = num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)
    yield from linear.specs(f"{prefix}.kv_b_proj", kv_rows, dims.kv_lora_rank)
    yield from linear.specs(f"{prefix}.o_proj", output_size, num_heads * dims.v_head_dim)


def _mha_specs(prefix: str, config: Eagle3MhaDraftConfig, linear: "_LinearSpecs") -> Iterator[tuple[str, TensorSpec]]:
    q_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    yield from linear.specs(f"{prefix}.q_proj", q_rows, 2 * config.hidden_size)
    yield from linear.specs(f"{prefix}.k_proj", kv_rows, 2 * config.hidden_size)
    yield from linear.specs(f"{prefix}.v_proj", kv_rows, 2 * config.hidden_size)
    yield from linear.specs(f"{prefix}.o_proj", config.hidden_size, q_rows)


def _mlp_specs(
    prefix: str, linear: "_LinearSpecs", hidden_size: int, intermediate_size: int
) -> Iterator[tuple[str, TensorSpec]]:
    yield from linear.specs(f"{prefix}.gate_proj", intermediate_size, hidden_size)
    yield from linear.specs(f"{prefix}.up_proj", intermediate_size, hidden_size)
    yield from linear.specs(f"{prefix}.down_proj", hidden_size, intermediate_size)


def _draft_specs(
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig, overrides: DraftOverrides
) -> Iterator[tuple[str, TensorSpec]]:
    hidden_size, layer = config.hidden_size, DRAFT_LAYER
    linear = _LinearSpecs(config.dtype, QuantizationConfig())
    # A matrix of the target's shape that the file lacks is the target's own.
    may_share = hidden_size == config.target_hidden_size
    yield "embed_tokens.weight", _embedding(config.dtype, config.vocab_size, hidden_size, is_required=not may_share)
    yield "fc.weight", _matrix(config.dtype, hidden_size, config.num_aux_hidden_states * config.target_hidden_size)
    if config.fc_norm or overrides.fc_norm is False:
        for chunk in range(config.num_aux_hidden_states):
            spec = _norm(config.dtype, config.target_hidden_size, is_required=config.fc_norm)
            yield f"fc_norm.{chunk}.weight", spec
    yield f"{layer}.input_layernorm.weight", _norm(config.dtype, hidden_size)
    yield f"{layer}.hidden_norm.weight", _norm(config.dtype, hidden_size)
    if isinstance(config, Eagle3MlaDraftConfig):
        yield from _mla_specs(f"{layer}.self_attn", config, linear, 2 * hidden_size, hidden_size)
    else:
        yield from _mha_specs(f"{layer}.self_attn", config, linear)
    yield f"{layer}.post_attention_layernorm.weight", _norm(config.dtype, hidden_size)
    yield from _mlp_specs(f"{layer}.mlp", linear, hidden_size, config.intermediate_size)
    yield "norm.weight", _norm(config.dtype, hidden_size)
    yield from _draft_head_specs(config, may_share)


def _draft_head_specs(config: Eagle3DraftConfig, may_share: bool) -> Iterator[tuple[str, TensorSpec]]:
    """A reduced head needs one of the two maps at least; `validation` sees to it."""
    is_reduced = config.draft_vocab_size < config.vocab_size
    head = _matrix(config.dtype, config.draft_vocab_size, config.hidden_size, is_required=is_reduced or not may_share)
    yield "lm_head.weight", head
    yield (
        "d2t",
        TensorSpec(
            role=TensorRole.DRAFT_TO_TARGET,
            shape=(config.draft_vocab_size,),
            dtypes=(torch.int64, torch.int32),
            is_required=False,
        ),
    )
    yield (
        "t2d",
        TensorSpec(
            role=TensorRole.TARGET_TO_DRAFT,
            shape=(config.vocab_size,),
            dtypes=(torch.bool, torch.uint8, torch.int32, torch.int64),
            is_required=False,
        ),
    )


@dataclass(frozen=True, slots=True)
class _LinearSpecs:
    """The tensors of a linear layer, quantised or not as its module's name says."""

    dtype: str
    quantization: QuantizationConfig

    def specs(self, module: str, out_features: int, in_features: int) -> Iterator[tuple[str, TensorSpec]]:
        if not self.quantization.quantizes(module):
            yield f"{module}.weight", _matrix(self.dtype, out_features, in_features)
        elif self.quantization.method is QuantizationMethod.INT4:
            yield from _int4(module, self.dtype, out_features, in_features, self.quantization.group_size)
        else:
            yield from _fp8(module, out_features, in_features, self.quantization.block_size)


def _int4(
    module: str, dtype: str, out_features: int, in_features: int, group_size: int
) -> Iterator[tuple[str, TensorSpec]]:
    matrix = (out_features, in_features)
    yield (
        f"{module}.weight_packed",
        TensorSpec(
            role=TensorRole.INT4_CODES,
            shape=(out_features, in_features // NIBBLES_PER_WORD),
            dtypes=(torch.int32,),
            matrix_shape=matrix,
        ),
    )
    yield (
        f"{module}.weight_scale",
        TensorSpec(
            role=TensorRole.INT4_SCALES,
            shape=(out_features, in_features // group_size),
            dtypes=float_dtypes(dtype),
            matrix_shape=matrix,
        ),
    )
    yield (
        f"{module}.weight_shape",
        TensorSpec(
            role=TensorRole.INT4_SHAPE,
            shape=(2,),
            dtypes=(torch.int32, torch.int64),
            matrix_shape=matrix,
            is_required=False,
        ),
    )


def _fp8(module: str, out_features: int, in_features: int, block_size: int) -> Iterator[tuple[str, TensorSpec]]:
    matrix = (out_features, in_features)
    yield (
        f"{module}.weight",
        TensorSpec(role=TensorRole.FP8_VALUES, shape=matrix, dtypes=(torch.float8_e4m3fn,), matrix_shape=matrix),
    )
    yield (
        f"{module}.weight_scale_inv",
        TensorSpec(
            role=TensorRole.FP8_SCALES,
            shape=(-(-out_features // block_size), -(-in_features // block_size)),
            dtypes=(torch.float32, torch.bfloat16),
            matrix_shape=matrix,
        ),
    )


def float_dtypes(first: str) -> tuple[torch.dtype, ...]:
    """The float dtypes a tensor may have (it is converted by value), the config's own first."""
    preferred = getattr(torch, first)
    return (preferred, *(dtype for dtype in FLOAT_DTYPES if dtype is not preferred))


def _norm(dtype: str, size: int, *, is_required: bool = True) -> TensorSpec:
    return TensorSpec(role=TensorRole.NORM, shape=(size,), dtypes=float_dtypes(dtype), is_required=is_required)


def _matrix(dtype: str, out_features: int, in_features: int, *, is_required: bool = True) -> TensorSpec:
    return TensorSpec(
        role=TensorRole.LINEAR,
        shape=(out_features, in_features),
        dtypes=float_dtypes(dtype),
        is_required=is_required,
    )


def _embedding(dtype: str, vocab_size: int, hidden_size: int, *, is_required: bool = True) -> TensorSpec:
    return TensorSpec(
        role=TensorRole.EMBEDDING,
        shape=(vocab_size, hidden_size),
        dtypes=float_dtypes(dtype),
        is_required=is_required,
    )
