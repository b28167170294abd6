"""The tensors of a layer's parts: norms, matrices and tables, quantised or not, attention and feed-forward blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from kimi_backend.checkpoint.tensor_spec import TensorRole, TensorSpec, float_dtypes
from kimi_backend.config.draft_config import Eagle3MhaDraftConfig
from kimi_backend.config.mla_dims import MlaDims
from kimi_backend.config.quantization_config import QuantizationConfig, QuantizationMethod, StoredFormat

NIBBLES_PER_WORD = 8
CODES_PER_BYTE = 2


def norm_spec(dtype: str, size: int, *, is_required: bool = True) -> TensorSpec:
    return TensorSpec(role=TensorRole.NORM, shape=(size,), dtypes=float_dtypes(dtype), is_required=is_required)


def bias_spec(dtype: str, size: int, *, is_required: bool = False) -> TensorSpec:
    return TensorSpec(role=TensorRole.BIAS, shape=(size,), dtypes=float_dtypes(dtype), is_required=is_required)


def biased_norm_specs(name: str, dtype: str, size: int) -> Iterator[tuple[str, TensorSpec]]:
    """A norm of a draft, whose file may hold a bias."""
    yield f"{name}.weight", norm_spec(dtype, size)
    yield f"{name}.bias", bias_spec(dtype, size)


class Bias(Enum):
    """Says whether a linear layer in a file has a bias."""

    NONE = "there is none"
    OPTIONAL = "the file decides"
    REQUIRED = "the config says it"


def matrix_spec(dtype: str, out_features: int, in_features: int, *, is_required: bool = True) -> TensorSpec:
    return TensorSpec(
        role=TensorRole.LINEAR,
        shape=(out_features, in_features),
        dtypes=float_dtypes(dtype),
        is_required=is_required,
    )


def embedding_spec(dtype: str, vocab_size: int, hidden_size: int, *, is_required: bool = True) -> TensorSpec:
    return TensorSpec(
        role=TensorRole.EMBEDDING,
        shape=(vocab_size, hidden_size),
        dtypes=float_dtypes(dtype),
        is_required=is_required,
    )


@dataclass(frozen=True, slots=True)
class LinearSpecs:
    """The tensors of a linear layer, quantised or not as its module's name says."""

    dtype: str
    quantization: QuantizationConfig
    bias: Bias = Bias.NONE
    """The bias of layers that say nothing else."""

    def specs(
        self, module: str, out_features: int, in_features: int, bias: Bias | None = None
    ) -> Iterator[tuple[str, TensorSpec]]:
        bias = self.bias if bias is None else bias
        if bias is not Bias.NONE:
            yield f"{module}.bias", bias_spec(self.dtype, out_features, is_required=bias is Bias.REQUIRED)
        stored = self.quantization.stored(module)
        if stored.method is QuantizationMethod.NONE:
            yield f"{module}.weight", matrix_spec(self.dtype, out_features, in_features)
            return
        values, scales = _QUANTISED[stored.method](stored, self.dtype, out_features, in_features)
        yield f"{module}.{stored.values}", values
        yield f"{module}.{stored.scales}", scales
        if stored.method is QuantizationMethod.INT4:
            yield f"{module}.weight_shape", _int4_shape(out_features, in_features)


def _int4(stored: StoredFormat, dtype: str, out_features: int, in_features: int) -> tuple[TensorSpec, TensorSpec]:
    matrix = (out_features, in_features)
    return (
        TensorSpec(
            role=TensorRole.INT4_CODES,
            shape=(out_features, in_features // NIBBLES_PER_WORD),
            dtypes=(torch.int32,),
            matrix_shape=matrix,
        ),
        TensorSpec(
            role=TensorRole.INT4_SCALES,
            shape=(out_features, in_features // stored.group_size),
            dtypes=float_dtypes(dtype),
            matrix_shape=matrix,
        ),
    )


def _int4_shape(out_features: int, in_features: int) -> TensorSpec:
    return TensorSpec(
        role=TensorRole.INT4_SHAPE,
        shape=(2,),
        dtypes=(torch.int32, torch.int64),
        matrix_shape=(out_features, in_features),
        is_required=False,
    )


def _mxfp4(stored: StoredFormat, dtype: str, out_features: int, in_features: int) -> tuple[TensorSpec, TensorSpec]:
    matrix = (out_features, in_features)
    return (
        TensorSpec(
            role=TensorRole.MXFP4_CODES,
            shape=(out_features, in_features // CODES_PER_BYTE),
            dtypes=(torch.uint8,),
            matrix_shape=matrix,
        ),
        TensorSpec(
            role=TensorRole.MXFP4_SCALES,
            shape=(out_features, in_features // stored.group_size),
            dtypes=(torch.uint8, torch.float8_e8m0fnu),
            matrix_shape=matrix,
        ),
    )


def _fp8(stored: StoredFormat, dtype: str, out_features: int, in_features: int) -> tuple[TensorSpec, TensorSpec]:
    matrix, block = (out_features, in_features), stored.block_size
    if block:
        shape: tuple[int, ...] = (-(-out_features // block), -(-in_features // block))
    else:
        shape = (1,) if stored.has_one_scale else (out_features,)
    return (
        TensorSpec(role=TensorRole.FP8_VALUES, shape=matrix, dtypes=(torch.float8_e4m3fn,), matrix_shape=matrix),
        TensorSpec(
            role=TensorRole.FP8_SCALES,
            shape=shape,
            dtypes=(torch.float32, torch.bfloat16, torch.float8_e8m0fnu),
            matrix_shape=matrix,
            rows_each=0 if stored.has_one_scale else block or 1,
        ),
    )


_QUANTISED = {QuantizationMethod.INT4: _int4, QuantizationMethod.MXFP4: _mxfp4, QuantizationMethod.FP8: _fp8}


def mla_specs(
    prefix: str, dims: MlaDims, linear: LinearSpecs, input_size: int, output_size: int, bias: Bias = Bias.NONE
) -> Iterator[tuple[str, TensorSpec]]:
    """bias: of the projections that DeepSeek's `attention_bias` means: both down-projections."""
    num_heads = dims.num_attention_heads
    if dims.q_lora_rank is None:
        yield from linear.specs(f"{prefix}.q_proj", num_heads * dims.qk_head_dim, input_size)
    else:
        yield from linear.specs(f"{prefix}.q_a_proj", dims.q_lora_rank, input_size, bias)
        yield f"{prefix}.q_a_layernorm.weight", norm_spec(linear.dtype, dims.q_lora_rank)
        yield from linear.specs(f"{prefix}.q_b_proj", num_heads * dims.qk_head_dim, dims.q_lora_rank)
    yield from linear.specs(f"{prefix}.kv_a_proj_with_mqa", dims.latent_dim, input_size, bias)
    yield f"{prefix}.kv_a_layernorm.weight", norm_spec(linear.dtype, dims.kv_lora_rank)
    kv_rows = num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)
    yield from linear.specs(f"{prefix}.kv_b_proj", kv_rows, dims.kv_lora_rank, Bias.NONE)
    yield from linear.specs(f"{prefix}.o_proj", output_size, num_heads * dims.v_head_dim)


def mha_specs(
    prefix: str, config: Eagle3MhaDraftConfig, linear: LinearSpecs, input_size: int, bias: Bias
) -> Iterator[tuple[str, TensorSpec]]:
    """bias: of queries, keys and values."""
    q_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    yield from linear.specs(f"{prefix}.q_proj", q_rows, input_size, bias)
    yield from linear.specs(f"{prefix}.k_proj", kv_rows, input_size, bias)
    yield from linear.specs(f"{prefix}.v_proj", kv_rows, input_size, bias)
    yield from linear.specs(f"{prefix}.o_proj", config.hidden_size, q_rows)


def mlp_specs(
    prefix: str, linear: LinearSpecs, hidden_size: int, intermediate_size: int
) -> Iterator[tuple[str, TensorSpec]]:
    yield from linear.specs(f"{prefix}.gate_proj", intermediate_size, hidden_size)
    yield from linear.specs(f"{prefix}.up_proj", intermediate_size, hidden_size)
    yield from linear.specs(f"{prefix}.down_proj", hidden_size, intermediate_size)
