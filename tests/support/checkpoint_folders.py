"""Tiny checkpoint folders, and ways to spoil them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kimi_backend.checkpoint.presets import Architecture, DraftKind, Preset
from kimi_backend.checkpoint.safetensors_source import INDEX_FILE, SINGLE_FILE
from kimi_backend.cli.make_checkpoint import make_checkpoint
from kimi_backend.config.quantization_config import QuantizationMethod

Tensors = dict[str, torch.Tensor]
PREFIX = "language_model."


def make_tiny(
    folder: Path,
    quantization: QuantizationMethod = QuantizationMethod.INT4,
    draft: DraftKind = DraftKind.MHA,
    architecture: Architecture = Architecture.KIMI_K25,
    *,
    num_layers: int = 2,
    shard_bytes: int = 10**9,
) -> Path:
    """A tiny target in `folder`, its draft in `folder/draft`."""
    make_checkpoint(
        folder,
        preset=Preset.TINY,
        num_layers=num_layers,
        quantization=quantization,
        draft=draft,
        architecture=architecture,
        shard_bytes=shard_bytes,
    )
    return folder


def copy_folder(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def edit_weights(folder: Path, edit: Callable[[Tensors], None]) -> None:
    """Change the tensors of a single-file checkpoint, under their stored names."""
    tensors = load_file(folder / SINGLE_FILE)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE_FILE)


def edit_json(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def shard(folder: Path, *, with_index: bool = True) -> list[Path]:
    """Split a single-file checkpoint into three shards; returns them."""
    tensors = load_file(folder / SINGLE_FILE)
    names = sorted(tensors)
    (folder / SINGLE_FILE).unlink()
    files, weight_map = [], {}
    for i in range(3):
        file = folder / f"model-{i + 1:05d}-of-00003.safetensors"
        part = names[i::3]
        save_file({name: tensors[name] for name in part}, file)
        weight_map |= dict.fromkeys(part, file.name)
        files.append(file)
    if with_index:
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files
