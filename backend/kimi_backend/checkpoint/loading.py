"""A checkpoint folder -> its config and checked tensors, ready for the models to read."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kimi_backend.checkpoint.checked_tensors import CheckedTensors
from kimi_backend.checkpoint.draft_names import DraftTensors
from kimi_backend.checkpoint.progress import WatchedTensors, byte_progress
from kimi_backend.checkpoint.safetensors_source import SafetensorsSource
from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.checkpoint.tensor_spec import draft_tensor_specs, target_tensor_specs
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
        source = SafetensorsSource.open(path)
        validate_target(config, source, str(path))
        checked = CheckedTensors(source, target_tensor_specs(config), str(path))
        return cls(Path(path), config, source, checked, source.num_bytes())

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
        source = SafetensorsSource.open(path)
        tensors = DraftTensors(source, str(path))
        validate_draft(config, tensors, str(path), overrides)
        checked = CheckedTensors(tensors, draft_tensor_specs(config, overrides), str(path))
        return cls(Path(path), config, tensors, checked, source.num_bytes())

    @contextmanager
    def loading(self, tp_size: int = 1) -> Iterator[TensorSource]:
        """As `TargetCheckpoint.loading`."""
        with byte_progress("loading draft", self.num_bytes // tp_size) as advance:
            yield WatchedTensors(self.tensors, advance)


def _require_folder(path: str | Path) -> None:
    if not Path(path).is_dir():
        found = "is a file" if Path(path).exists() else "no such folder"
        raise CheckpointError(str(path), [f"{found}, expected a checkpoint folder"])
