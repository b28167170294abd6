"""Trained modules <-> checkpoint folders in the formats that the server reads."""

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
from kimi_backend.checkpoint.model_specs import DRAFT_LAYER, target_tensor_specs
from kimi_backend.checkpoint.presets import DraftKind
from kimi_backend.checkpoint.safetensors_source import TEXT_PREFIX
from kimi_backend.checkpoint.tensor_source import InMemoryTensors, TensorSource
from kimi_backend.checkpoint.writer import write_checkpoint
from kimi_backend.config.draft_config import NO_OVERRIDES, DraftOverrides
from kimi_backend.config.model_config import KimiModelConfig
from kimi_kernels.quantization.plain import dequantize_int4, quantize_int4
from kimi_kernels.weights import Int4Weight
from kimi_nano.drafts import NanoDraft
from kimi_nano.formulas import INT4_GROUP, fake_int4
from kimi_nano.recipe import Recipe
from kimi_nano.target import NanoTarget

Tensors = dict[str, Tensor]
TARGET_FOLDER = "kimi-nano"
DRAFT_FOLDERS = {DraftKind.MLA: "draft", DraftKind.MLA31: "draft-mla31", DraftKind.MHA: "draft-mha"}


@torch.no_grad()
def bake(target: NanoTarget) -> None:
    """Set every weight to what its file will hold: experts rounded to int4, the rest to bf16."""
    for name, parameter in target.weights.items():
        is_expert = name.endswith(("experts_gate_up", "experts_down"))
        parameter.copy_(fake_int4(parameter) if is_expert else parameter.bfloat16().float())
    target.quantizes = False


@torch.no_grad()
def unbake(target: NanoTarget) -> None:
    """Move the largest expert weights of each group so that rounding gives every group back as it is.

    Rounding maps a group's largest weight to 7 or -8 of its 7.5 steps, so rounding the result again would take
    another scale. Training that goes on with rounding in the forward pass starts from what the file holds.
    """
    for name, parameter in target.weights.items():
        if name.endswith(("experts_gate_up", "experts_down")):
            parameter.copy_(rounding_source(parameter))


def rounding_source(baked: Tensor) -> Tensor:
    """A weight that `fake_int4` turns into `baked`, group by group as far as that is possible."""
    groups = baked.unflatten(-1, (-1, INT4_GROUP))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    best, best_error = groups, torch.full_like(largest, float("inf"))
    for steps, stretched in ((7, 7.49), (8, 7.51)):
        candidate = torch.where(groups.abs() == largest, groups * (stretched / steps), groups)
        error = (fake_int4(candidate.flatten(-2)).unflatten(-1, (-1, INT4_GROUP)) - groups).abs()
        error = error.amax(dim=-1, keepdim=True)
        best = torch.where(error < best_error, candidate, best)
        best_error = torch.minimum(error, best_error)
    source: Tensor = best.flatten(-2)
    return source


@torch.no_grad()
def write_target(folder: Path, target: NanoTarget, recipe: Recipe, tokenizer: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files.

    Args:
        target: with the weights of its training; baked ones would be rounded twice.
        tokenizer: folder with the tokenizer's files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        shutil.copy(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(recipe.target_json(), indent=2) + "\n")
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _target_tensors(target).items()}
    names = [name for name in target_tensor_specs(target.config) if name in tensors]
    if len(names) != len(tensors):
        raise ValueError(f"tensors without a place in the file: {sorted(set(tensors) - set(names))}")
    write_checkpoint(folder, InMemoryTensors(tensors), names, stored_name=lambda name: TEXT_PREFIX + name)


def _target_tensors(target: NanoTarget) -> Tensors:
    config, tensors = target.config, dict[str, Tensor]()
    for key, parameter in target.weights.items():
        name = key.replace("/", ".")
        if name.endswith("experts_gate_up"):
            gate, up = parameter.chunk(2, dim=1)
            prefix = name.removesuffix("_gate_up")
            tensors |= _int4_tensors(prefix, "gate_proj", gate) | _int4_tensors(prefix, "up_proj", up)
        elif name.endswith("experts_down"):
            tensors |= _int4_tensors(name.removesuffix("_down"), "down_proj", parameter)
        else:
            tensors[name] = parameter.bfloat16()
    moe_layers = [layer for layer in range(config.num_hidden_layers) if config.is_moe_layer(layer)]
    for place, layer in enumerate(moe_layers):
        tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = target.bias[place].float()
    return tensors


def _int4_tensors(prefix: str, projection: str, stacked: Tensor) -> Tensors:
    """stacked: [E, out_features, in_features]."""
    weight = quantize_int4(stacked.float())
    tensors = {}
    for expert in range(stacked.shape[0]):
        module = f"{prefix}.{expert}.{projection}"
        tensors[f"{module}.weight_packed"] = weight.packed[expert]
        tensors[f"{module}.weight_scale"] = weight.scales[expert]
        tensors[f"{module}.weight_shape"] = torch.tensor(stacked.shape[1:], dtype=torch.int32)
    return tensors


@torch.no_grad()
def read_target(folder: Path) -> NanoTarget:
    """A module with the weights of a checkpoint, experts dequantised."""
    checkpoint = TargetCheckpoint.open(folder)
    target, source, config = NanoTarget(checkpoint.config), checkpoint.tensors, checkpoint.config
    for key, parameter in target.weights.items():
        name = key.replace("/", ".")
        if name.endswith("experts_gate_up"):
            prefix = name.removesuffix("_gate_up")
            halves = [_read_experts(source, config, prefix, projection) for projection in ("gate_proj", "up_proj")]
            parameter.copy_(torch.cat(halves, dim=1))
        elif name.endswith("experts_down"):
            parameter.copy_(_read_experts(source, config, name.removesuffix("_down"), "down_proj"))
        else:
            parameter.copy_(source.read(name).float())
    moe_layers = [layer for layer in range(config.num_hidden_layers) if config.is_moe_layer(layer)]
    for place, layer in enumerate(moe_layers):
        target.bias[place] = source.read(f"model.layers.{layer}.mlp.gate.e_score_correction_bias")
    return target.requires_grad_(False)


def _read_experts(source: TensorSource, config: KimiModelConfig, prefix: str, projection: str) -> Tensor:
    """[E, out_features, in_features] float32."""
    group = config.expert_format.group_size
    experts = []
    for expert in range(config.n_routed_experts):
        module = f"{prefix}.{expert}.{projection}"
        packed, scales = source.read(f"{module}.weight_packed"), source.read(f"{module}.weight_scale")
        experts.append(dequantize_int4(Int4Weight(packed=packed, scales=scales, group_size=group)))
    return torch.stack(experts)


@torch.no_grad()
def write_draft(folder: Path, draft: NanoDraft, kind: DraftKind, recipe: Recipe) -> None:
    """Write config.json and model.safetensors; what the target shares stays out of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(recipe.draft_json(kind), indent=2) + "\n")
    tensors = {key.replace("/", "."): parameter.bfloat16().cpu() for key, parameter in draft.weights.items()}
    if draft.kept_tokens is not None:
        kept = draft.kept_tokens.cpu()
        mask = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
        mask[kept] = True
        tensors |= {"d2t": kept - torch.arange(len(kept)), "t2d": mask}
    # Public Llama drafts call their layer `midlayer`, the MLA ones `layers.0`.
    layer = "midlayer" if kind is DraftKind.MHA else DRAFT_LAYER
    write_checkpoint(
        folder,
        InMemoryTensors(tensors),
        list(tensors),
        stored_name=lambda name: name.replace(f"{DRAFT_LAYER}.", f"{layer}.", 1),
    )


@torch.no_grad()
def read_draft(folder: Path, target: KimiModelConfig, overrides: DraftOverrides = NO_OVERRIDES) -> NanoDraft:
    """A module with the weights of a checkpoint, its settings overridden as the server would."""
    checkpoint = DraftCheckpoint.open(folder, target, overrides)
    config, source = checkpoint.config, checkpoint.tensors
    has_head = "lm_head.weight" in source.names()
    head = torch.zeros(config.draft_vocab_size, config.hidden_size) if has_head else None
    kept = None
    if "d2t" in source.names():
        kept = source.read("d2t").long() + torch.arange(config.draft_vocab_size)
    draft = NanoDraft(config, head, kept)
    for key, parameter in draft.weights.items():
        parameter.copy_(source.read(key.replace("/", ".")).float())
    return draft.requires_grad_(False)
