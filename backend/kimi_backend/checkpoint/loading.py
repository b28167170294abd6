"""A checkpoint folder -> its config and checked tensors, ready for the models to read."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kimi_backend.checkpoint.canonical_tensors import CanonicalTensors
from kimi_backend.checkpoint.checked_tensors import CheckedTensors
from kimi_backend.checkpoint.model_specs import draft_tensor_specs, target_tensor_specs
from kimi_backend.checkpoint.progress import WatchedTensors, byte_progress
from kimi_backend.checkpoint.random_tensors import RandomTensors
from kimi_backend.checkpoint.safetensors_source import SafetensorsSource
from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.checkpoint.tensor_spec import Specs, TensorRole
from kimi_backend.checkpoint.validation import validate_draft, validate_target
from kimi_backend.config.draft_config import (
    NO_OVERRIDES,
    DraftOverrides,
    Eagle3DraftConfig,
    Eagle3MhaDraftConfig,
    Eagle3MlaDraftConfig,
)
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.errors import CheckpointError

_DUMMY_TARGET_SEED = 0
_DUMMY_DRAFT_SEED = 1


@dataclass(frozen=True, slots=True)
class TargetCheckpoint:
    """A target's files: names, shapes and dtypes are checked; values of scales are checked as they are read."""

    path: Path
    config: KimiModelConfig
    stored: TensorSource
    """The same tensors, values unchecked."""
    tensors: TensorSource
    num_bytes: int

    @classmethod
    def open(cls, path: str | Path) -> "TargetCheckpoint":
        """
        Raises:
            ConfigError: config.json is absent or says what cannot be served.
            CheckpointError: the files do not fit the config; lists every reason.
        """
        _require_folder(path)
        config = KimiModelConfig.from_hf_json(path)
        source, specs = SafetensorsSource.open(path), target_tensor_specs(config)
        tensors = CanonicalTensors.of_target(source, specs, str(path))
        validate_target(config, tensors, str(path))
        checked = CheckedTensors(tensors, specs, str(path))
        return cls(Path(path), config, tensors, checked, source.num_bytes())

    @classmethod
    def dummy(cls, path: str | Path, device: torch.device) -> "TargetCheckpoint":
        """Random weights made on `device`, of the geometry in the folder's config.json; no other file is read.

        Raises:
            ConfigError: config.json is absent or says what cannot be served.
        """
        _require_folder(path)
        config = KimiModelConfig.from_hf_json(path)
        specs = target_tensor_specs(config)
        source = RandomTensors(specs, _DUMMY_TARGET_SEED, device)
        return cls(Path(path), config, source, source, _num_bytes(specs))

    @contextmanager
    def loading(self, tp_size: int = 1) -> Iterator[TensorSource]:
        """The tensors while a progress bar shows how far the reading is; a rank of several reads its part."""
        with byte_progress("loading target", self.num_bytes // tp_size) as advance:
            yield WatchedTensors(self.tensors, advance)


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft's files, under canonical names; checked like the target's, vocabulary maps included."""

    path: Path
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig
    stored: TensorSource
    tensors: TensorSource
    num_bytes: int

    @classmethod
    def open(
        cls, path: str | Path, target: KimiModelConfig, overrides: DraftOverrides = NO_OVERRIDES
    ) -> "DraftCheckpoint":
        """Raises as `TargetCheckpoint.open`."""
        _require_folder(path)
        config = Eagle3DraftConfig.from_hf_json(path, target, overrides)
        source, specs = SafetensorsSource.open(path), draft_tensor_specs(config, overrides)
        tensors = CanonicalTensors.of_draft(source, specs, str(path), ties_head=config.ties_head)
        validate_draft(config, tensors, str(path), overrides)
        checked = CheckedTensors(tensors, specs, str(path))
        return cls(Path(path), config, tensors, checked, source.num_bytes())

    @classmethod
    def dummy(
        cls,
        path: str | Path,
        target: KimiModelConfig,
        device: torch.device,
        overrides: DraftOverrides = NO_OVERRIDES,
    ) -> "DraftCheckpoint":
        """Make a `TargetCheckpoint.dummy` of a draft; embedding and head are the target's where shapes allow it."""
        _require_folder(path)
        config = Eagle3DraftConfig.from_hf_json(path, target, overrides)
        is_reduced = config.draft_vocab_size < config.vocab_size
        maps = (TensorRole.DRAFT_TO_TARGET, TensorRole.TARGET_TO_DRAFT) if is_reduced else ()
        every = draft_tensor_specs(config, overrides)
        specs = {name: spec for name, spec in every.items() if spec.is_required or spec.role in maps}
        source = RandomTensors(specs, _DUMMY_DRAFT_SEED, device)
        return cls(Path(path), config, source, source, _num_bytes(specs))

    @contextmanager
    def loading(self, tp_size: int = 1) -> Iterator[TensorSource]:
        """Do what `TargetCheckpoint.loading` does."""
        with byte_progress("loading draft", self.num_bytes // tp_size) as advance:
            yield WatchedTensors(self.tensors, advance)


def _require_folder(path: str | Path) -> None:
    if not Path(path).is_dir():
        found = "is a file" if Path(path).exists() else "no such folder"
        raise CheckpointError(str(path), [f"{found}, expected a checkpoint folder"])


def _num_bytes(specs: Specs) -> int:
    return sum(spec.num_bytes for spec in specs.values())
