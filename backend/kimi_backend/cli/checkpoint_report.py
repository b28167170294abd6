"""The statements of `kimi inspect` about a checkpoint: plain values, ready for JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kimi_backend.checkpoint.checked_tensors import VALUE_CHECKED_ROLES, check_values
from kimi_backend.checkpoint.layer_specs import CODES_PER_BYTE, NIBBLES_PER_WORD
from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
from kimi_backend.checkpoint.model_specs import draft_tensor_specs, target_tensor_specs
from kimi_backend.checkpoint.progress import WatchedTensors, byte_progress
from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.checkpoint.tensor_spec import Specs, TensorRole
from kimi_backend.config.draft_config import Eagle3MlaDraftConfig
from kimi_backend.config.memory_plan import MemoryPlan, MemorySettings, plan_memory
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.config.rope_config import RopeConfig, RopeType
from kimi_backend.errors import CheckpointError, ConfigError, InvalidRequestError
from kimi_backend.text.chat_template import ChatTemplate, load_chat_template
from kimi_backend.text.tokenizer import HF_TOKENIZER_FILE, TIKTOKEN_FILE, load_tokenizer

Report = dict[str, Any]

_CODES_EACH = {TensorRole.INT4_CODES: NIBBLES_PER_WORD, TensorRole.MXFP4_CODES: CODES_PER_BYTE}
_KV_DTYPES = ("bfloat16", "float8_e4m3fn")
_NOT_PARAMETERS = (
    TensorRole.INT4_SCALES,
    TensorRole.INT4_SHAPE,
    TensorRole.FP8_SCALES,
    TensorRole.MXFP4_SCALES,
    TensorRole.DRAFT_TO_TARGET,
    TensorRole.TARGET_TO_DRAFT,
)


def report_target(checkpoint: TargetCheckpoint) -> Report:
    config = checkpoint.config
    specs = target_tensor_specs(config)
    return {
        "path": str(checkpoint.path),
        "architecture": config.architecture,
        "format": describe_format(config),
        "weights": _weights(checkpoint.path),
        "num_tensors": len(checkpoint.tensors.names()),
        "num_bytes": checkpoint.num_bytes,
        "num_parameters": num_parameters(specs),
        "num_active_parameters": active_parameters(config, specs),
        "num_hidden_layers": config.num_hidden_layers,
        "num_moe_layers": config.num_moe_layers,
        "experts": {
            "routed": config.n_routed_experts,
            "chosen": config.num_experts_per_tok,
            "shared": config.n_shared_experts,
        },
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_ids": list(config.eos_token_ids),
        "rope": describe_rope(config.rope),
        "softmax_scale": config.softmax_scale,
        "kv_bytes_per_token": {dtype: config.kv_bytes_per_token(dtype) for dtype in _KV_DTYPES},
        **_warnings(config.warnings),
    }


def report_draft(checkpoint: DraftCheckpoint, tp_size: int) -> Report:
    config, names = checkpoint.config, checkpoint.tensors.names()
    specs = {name: spec for name, spec in draft_tensor_specs(config).items() if name in names}
    return {
        "path": str(checkpoint.path),
        "attention": "MLA" if isinstance(config, Eagle3MlaDraftConfig) else "MHA",
        "algorithm": "EAGLE3.1" if config.fc_norm or config.norm_output else "EAGLE3",
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "num_hidden_layers": config.num_hidden_layers,
        "aux_layer_ids": list(config.aux_layer_ids),
        "aux_layer_rule": config.aux_layer_rule,
        "trained_positions": config.trained_positions,
        "weights": _weights(checkpoint.path),
        "num_tensors": len(names),
        "num_bytes": checkpoint.num_bytes,
        "num_parameters": num_parameters(specs),
        "draft_vocab_size": config.draft_vocab_size,
        "embedding": "own" if "embed_tokens.weight" in names else "the target's",
        "head": "own" if "lm_head.weight" in names else "the target's",
        "rope": describe_rope(config.rope),
        "kv_bytes_per_token": {dtype: config.kv_bytes_per_token(dtype, tp_size) for dtype in _KV_DTYPES},
        **_warnings(config.warnings),
    }


def has_weights(folder: Path) -> bool:
    """False for a folder of configs alone, whose weights are yet to be fetched."""
    return folder.is_file() or any(folder.glob("*.safetensors*"))


def _weights(folder: Path) -> str:
    return (
        "checked against the config" if has_weights(folder) else "not here: tensors and bytes as the config means them"
    )


def _warnings(warnings: tuple[str, ...]) -> Report:
    return {"warnings": list(warnings)} if warnings else {}


def report_text(folder: Path, target: KimiModelConfig) -> Report:
    """The tokenizer and the chat template, tried on a short conversation.

    Raises:
        CheckpointError: one of their files is malformed, or the tokenizer has tokens that the model has no row for.
    """
    if not any((folder / name).exists() for name in (TIKTOKEN_FILE, HF_TOKENIZER_FILE)):
        return {"files": "none here; the setting tokenizer names another folder"}
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > target.vocab_size:
        problem = f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocab_size is {target.vocab_size}"
        raise CheckpointError(str(folder), [problem])
    template = load_chat_template(folder, tokenizer)
    return {
        "files": TIKTOKEN_FILE if (folder / TIKTOKEN_FILE).exists() else HF_TOKENIZER_FILE,
        "num_tokens": tokenizer.vocab_size,
        "end_of_reply_ids": list(tokenizer.eos_token_ids),
        "chat_template": "none" if template is None else _try_template(template),
    }


def _try_template(template: ChatTemplate) -> str:
    try:
        num_tokens = len(template.encode([{"role": "user", "content": "Hello"}]))
    except InvalidRequestError as error:
        return f"refuses a user's turn: {error}"
    return f"renders a user's turn in {num_tokens} tokens"


def report_memory(
    target: KimiModelConfig, draft: DraftCheckpoint | None, settings: MemorySettings, draft_vocab: int = 0
) -> Report:
    """The plan, or why there is none.

    Args:
        draft_vocab: tokens that the draft's head keeps; 0 keeps all.
    """
    config = draft.config if draft else None
    if config is not None and draft_vocab:
        config = replace(config, draft_vocab_size=min(draft_vocab, config.draft_vocab_size))
    try:
        plan = plan_memory(target, config, settings)
    except ConfigError as error:
        return {"fits": False, "reason": str(error), "gpu_bytes": settings.gpu_bytes, "tp_size": settings.tp_size}
    return {"fits": True, "gpu_bytes": settings.gpu_bytes, "tp_size": settings.tp_size, **_plan_values(plan)}


def check_all_values(target: TargetCheckpoint, draft: DraftCheckpoint | None) -> None:
    """Read every scale, norm and bias of the files that are there, with a progress bar.

    Raises:
        CheckpointError: some are NaN, infinite, or negative where that makes no sense; all are listed.
    """
    checked: list[tuple[str, Specs, TensorSource]] = []
    if has_weights(target.path):
        checked.append((str(target.path), target_tensor_specs(target.config), target.stored))
    if draft is not None and has_weights(draft.path):
        checked.append((str(draft.path), draft_tensor_specs(draft.config), draft.stored))
    for path, specs, tensors in checked:
        total = sum(spec.num_bytes for spec in specs.values() if spec.role in VALUE_CHECKED_ROLES)
        with byte_progress("checking values", total) as advance:
            problems = check_values(specs, WatchedTensors(tensors, advance))
        if problems:
            raise CheckpointError(path, problems)


def describe_format(config: KimiModelConfig) -> str:
    """Name the format that each part is stored in."""
    parts: dict[str, list[str]] = {}
    for part, module in _typical_modules(config):
        stored = config.quantization.stored(module)
        if stored.method is not QuantizationMethod.NONE:
            parts.setdefault(stored.describe(), []).append(part)
    texts = [f"{_listed(names)} {text}" for text, names in parts.items()]
    return f"{'; '.join(texts)}, the rest {config.dtype}" if texts else config.dtype


def _listed(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _typical_modules(config: KimiModelConfig) -> Iterator[tuple[str, str]]:
    """A linear layer of each part of the model."""
    layers = range(config.num_hidden_layers)
    moe = next((layer for layer in layers if config.is_moe_layer(layer)), None)
    dense = next((layer for layer in layers if not config.is_moe_layer(layer)), None)
    if moe is not None:
        yield "routed experts", f"model.layers.{moe}.mlp.experts.0.gate_proj"
        if config.n_shared_experts:
            yield "shared experts", f"model.layers.{moe}.mlp.shared_experts.gate_proj"
    if dense is not None:
        yield "dense MLPs", f"model.layers.{dense}.mlp.gate_proj"
    yield "attention", "model.layers.0.self_attn.o_proj"


def describe_rope(rope: RopeConfig) -> str:
    pairing = "interleaved" if rope.interleaved else "half-split"
    original = rope.original_max_position_embeddings
    if rope.type is RopeType.DEFAULT:
        return f"theta {rope.theta:g}, {pairing}"
    if rope.type is RopeType.LINEAR:
        return f"linear, theta {rope.theta:g}, factor {rope.factor:g}, {pairing}"
    if rope.type is RopeType.LLAMA3:
        turns = f"turns {rope.low_freq_factor:g} to {rope.high_freq_factor:g}"
        return f"llama3, theta {rope.theta:g}, factor {rope.factor:g} over {original}, {turns}, {pairing}"
    betas = f"beta_fast {rope.beta_fast:g}, beta_slow {rope.beta_slow:g}"
    return f"yarn, theta {rope.theta:g}, factor {rope.factor:g} over {original}, {betas}, {pairing}"


def num_parameters(specs: Specs) -> int:
    """Weights of the model, however they are packed."""
    return sum(_parameters(specs).values())


def active_parameters(config: KimiModelConfig, specs: Specs) -> int:
    """Weights that one token meets."""
    parameters = _parameters(specs)
    in_experts = sum(count for name, count in parameters.items() if ".mlp.experts." in name)
    idle = in_experts * (config.n_routed_experts - config.num_experts_per_tok) // config.n_routed_experts
    return sum(parameters.values()) - idle


def _parameters(specs: Specs) -> Mapping[str, int]:
    return {
        name: spec.num_elements * _CODES_EACH.get(spec.role, 1)
        for name, spec in specs.items()
        if spec.role not in _NOT_PARAMETERS
    }


def _plan_values(plan: MemoryPlan) -> Report:
    return {
        "target_weight_bytes": plan.target_weight_bytes,
        "draft_weight_bytes": plan.draft_weight_bytes,
        "activation_bytes": plan.activation_bytes,
        "target_kv_bytes_per_token": plan.target_kv_bytes_per_token,
        "draft_kv_bytes_per_token": plan.draft_kv_bytes_per_token,
        "block_size": plan.block_size,
        "num_target_blocks": plan.num_target_blocks,
        "num_draft_blocks": plan.num_draft_blocks,
        "num_kv_tokens": plan.num_kv_tokens,
        "max_model_len": plan.max_model_len,
    }
