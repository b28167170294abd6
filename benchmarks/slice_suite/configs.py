"""The slice's checkpoint folder: configs and tokenizer, no weights, for `load_format = dummy`."""

from pathlib import Path

from kimi_backend.checkpoint.presets import Architecture, DraftKind, Preset
from kimi_backend.cli.make_checkpoint import DRAFT_FOLDER, make_checkpoint
from kimi_backend.config.quantization_config import QuantizationMethod


def write_slice(folder: Path, num_layers: int, preset: Preset) -> tuple[Path, Path]:
    """Folders of a target of one dense and num_layers - 1 expert layers, int4, and of its EAGLE3 MLA draft."""
    target = folder / f"{preset.value}-{num_layers}-layers"
    if not target.exists():
        make_checkpoint(
            target,
            preset=preset,
            num_layers=num_layers,
            quantization=QuantizationMethod.INT4,
            draft=DraftKind.MLA,
            architecture=Architecture.KIMI_K25,
            has_weights=False,
        )
    return target, target / DRAFT_FOLDER
