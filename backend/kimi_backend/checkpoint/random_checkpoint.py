"""Writes whole checkpoint folders of random weights: config.json and weights, in the real layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_backend.checkpoint.model_specs import DRAFT_LAYER, draft_tensor_specs, target_tensor_specs
from kimi_backend.checkpoint.progress import byte_progress
from kimi_backend.checkpoint.random_tensors import RandomTensors
from kimi_backend.checkpoint.safetensors_source import TEXT_PREFIX
from kimi_backend.checkpoint.tensor_spec import Specs, TensorRole
from kimi_backend.checkpoint.writer import DEFAULT_SHARD_BYTES, write_checkpoint
from kimi_backend.config.draft_config import Eagle3DraftConfig, Eagle3MhaDraftConfig
from kimi_backend.config.model_config import MULTIMODAL_ARCHITECTURE, KimiModelConfig

_VOCABULARY_MAPS = (TensorRole.DRAFT_TO_TARGET, TensorRole.TARGET_TO_DRAFT)


def write_random_target(
    folder: Path, config_json: Mapping[str, Any], *, seed: int = 0, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> KimiModelConfig:
    """Write a target's config.json and weights into an existing folder.

    Raises:
        ConfigError: the config is not one that this program serves.
        CheckpointError: a file cannot be written.
    """
    config = KimiModelConfig.from_hf_json(config_json)
    write_config(folder, config_json)
    specs = target_tensor_specs(config)
    prefix = TEXT_PREFIX if config.architecture == MULTIMODAL_ARCHITECTURE else ""
    with byte_progress("writing target", _num_bytes(specs)) as advance:
        write_checkpoint(
            folder,
            RandomTensors(specs, seed),
            list(specs),
            shard_bytes=shard_bytes,
            stored_name=lambda name: prefix + name,
            advance=advance,
        )
    return config


def write_random_draft(
    folder: Path,
    config_json: Mapping[str, Any],
    target: KimiModelConfig,
    *,
    seed: int = 1,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Do what `write_random_target` does, for a draft, which gets its own embedding and head; makes the folder."""
    config = Eagle3DraftConfig.from_hf_json(config_json, target)
    write_config(folder, config_json)
    specs = draft_tensor_specs(config)
    has_full_vocabulary = config.draft_vocab_size == config.vocab_size
    tensors = RandomTensors(specs, seed)
    left_out = _VOCABULARY_MAPS if has_full_vocabulary else ()
    names = [name for name, spec in specs.items() if name in tensors.names() and spec.role not in left_out]
    # Public Llama drafts call their layer `midlayer`, the MLA ones `layers.0`.
    layer = "midlayer" if isinstance(config, Eagle3MhaDraftConfig) else DRAFT_LAYER
    with byte_progress("writing draft", _num_bytes({name: specs[name] for name in names})) as advance:
        write_checkpoint(
            folder,
            tensors,
            names,
            shard_bytes=shard_bytes,
            stored_name=lambda name: name.replace(f"{DRAFT_LAYER}.", f"{layer}.", 1),
            advance=advance,
        )


def _num_bytes(specs: Specs) -> int:
    return sum(spec.num_bytes for spec in specs.values())


def write_config(folder: Path, config_json: Mapping[str, Any]) -> None:
    """Write config.json alone, which is all that `load_format = dummy` reads; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")
