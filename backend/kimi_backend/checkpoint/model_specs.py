"""Every tensor a checkpoint must hold, from its config: the one list of names, shapes and dtypes.

The models read these names, `validation` compares files with them, `random_tensors` and `writer` make files from them.
Each model's own module explains what its tensors mean.
"""

from collections.abc import Iterator

import torch

from kimi_backend.checkpoint.layer_specs import (
    Bias,
    LinearSpecs,
    bias_spec,
    biased_norm_specs,
    embedding_spec,
    matrix_spec,
    mha_specs,
    mla_specs,
    mlp_specs,
    norm_spec,
)
from kimi_backend.checkpoint.tensor_spec import Specs, TensorRole, TensorSpec
from kimi_backend.config.draft_config import (
    NO_OVERRIDES,
    DraftOverrides,
    Eagle3DraftConfig,
    Eagle3MhaDraftConfig,
    Eagle3MlaDraftConfig,
)
from kimi_backend.config.model_config import KimiModelConfig

DRAFT_LAYER = "layers.0"


def target_tensor_specs(config: KimiModelConfig) -> Specs:
    """All tensors of a target, without the `language_model.` prefix, in file order."""
    return dict(_target_specs(config))


def draft_tensor_specs(
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig, overrides: DraftOverrides = NO_OVERRIDES
) -> Specs:
    """All tensors of a draft, under their canonical names (`canonical_tensors.canonical_draft_name`).

    Args:
        overrides: those that `config` was read with: norms that the operator switched off may stay in the file.
    """
    return dict(_draft_specs(config, overrides))


def _target_specs(config: KimiModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    yield "model.embed_tokens.weight", embedding_spec(config.dtype, config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        yield from _layer_specs(config, layer)
    yield "model.norm.weight", norm_spec(config.dtype, config.hidden_size)
    yield "lm_head.weight", matrix_spec(config.dtype, config.vocab_size, config.hidden_size)


def _layer_specs(config: KimiModelConfig, layer: int) -> Iterator[tuple[str, TensorSpec]]:
    prefix = f"model.layers.{layer}"
    linear = LinearSpecs(config.dtype, config.quantization)
    yield f"{prefix}.input_layernorm.weight", norm_spec(config.dtype, config.hidden_size)
    yield from mla_specs(f"{prefix}.self_attn", config, linear, config.hidden_size, config.hidden_size)
    yield f"{prefix}.post_attention_layernorm.weight", norm_spec(config.dtype, config.hidden_size)
    if not config.is_moe_layer(layer):
        yield from mlp_specs(f"{prefix}.mlp", linear, config.hidden_size, config.intermediate_size)
        return
    num_experts, expert_width = config.n_routed_experts, config.moe_intermediate_size
    yield f"{prefix}.mlp.gate.weight", matrix_spec(config.dtype, num_experts, config.hidden_size)
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
        (name.removeprefix(first), spec) for name, spec in mlp_specs(first, linear, config.hidden_size, expert_width)
    ]
    for expert in range(num_experts):
        for suffix, spec in an_expert:
            yield f"{prefix}.mlp.experts.{expert}{suffix}", spec
    if config.n_shared_experts:
        shared_width = config.n_shared_experts * expert_width
        yield from mlp_specs(f"{prefix}.mlp.shared_experts", linear, config.hidden_size, shared_width)


def _draft_specs(
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig, overrides: DraftOverrides
) -> Iterator[tuple[str, TensorSpec]]:
    hidden_size, dtype = config.hidden_size, config.dtype
    linear = LinearSpecs(dtype, config.quantization, Bias.OPTIONAL)
    # A matrix of the target's shape that the file lacks is the target's own.
    may_share = hidden_size == config.target_hidden_size
    yield "embed_tokens.weight", embedding_spec(dtype, config.vocab_size, hidden_size, is_required=not may_share)
    aux_width = config.num_aux_hidden_states * config.target_hidden_size
    yield from linear.specs("fc", hidden_size, aux_width)
    if config.norm_before_fc:
        yield from biased_norm_specs("input_norm", dtype, aux_width)
    if config.fc_norm or overrides.fc_norm is False:
        for chunk in range(config.num_aux_hidden_states):
            spec = norm_spec(dtype, config.target_hidden_size, is_required=config.fc_norm)
            yield f"fc_norm.{chunk}.weight", spec
            yield f"fc_norm.{chunk}.bias", bias_spec(dtype, config.target_hidden_size)
    for index in range(config.num_hidden_layers):
        yield from _draft_layer_specs(config, index, linear)
    yield from biased_norm_specs("norm", dtype, hidden_size)
    yield from _draft_head_specs(config, may_share)


def _draft_layer_specs(
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig, index: int, linear: LinearSpecs
) -> Iterator[tuple[str, TensorSpec]]:
    """The first layer reads the embedding beside the hidden state, later ones the hidden state alone."""
    hidden_size, layer = config.hidden_size, f"layers.{index}"
    input_size = hidden_size if index else 2 * hidden_size
    bias = Bias.REQUIRED if config.attention_bias else Bias.OPTIONAL
    yield from biased_norm_specs(f"{layer}.input_layernorm", config.dtype, hidden_size)
    if index == 0:
        yield from biased_norm_specs(f"{layer}.hidden_norm", config.dtype, hidden_size)
    if isinstance(config, Eagle3MlaDraftConfig):
        yield from mla_specs(f"{layer}.self_attn", config, linear, input_size, hidden_size, bias)
    else:
        yield from mha_specs(f"{layer}.self_attn", config, linear, input_size, bias)
    yield from biased_norm_specs(f"{layer}.post_attention_layernorm", config.dtype, hidden_size)
    yield from mlp_specs(f"{layer}.mlp", linear, hidden_size, config.intermediate_size)


def _draft_head_specs(config: Eagle3DraftConfig, may_share: bool) -> Iterator[tuple[str, TensorSpec]]:
    """A reduced head needs one of the two maps at least; `validation` sees to it."""
    is_reduced = config.draft_vocab_size < config.vocab_size
    head = matrix_spec(
        config.dtype, config.draft_vocab_size, config.hidden_size, is_required=is_reduced or not may_share
    )
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
