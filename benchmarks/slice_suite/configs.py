"""The slice's checkpoint folder: configs and tokenizer, no weights, for `load_format = dummy`."""

import json
from pathlib import Path
from typing import Any

from kimi_backend.checkpoint.presets import Architecture, DraftKind, Preset
from kimi_backend.cli.make_checkpoint import DRAFT_FOLDER, make_checkpoint
from kimi_backend.config.quantization_config import QuantizationMethod

DIVIDED_WIDTHS = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
"""Fields of both models' configs that ranks divide, the vocabulary left out."""
HEADS = ("num_attention_heads", "num_key_value_heads")


def write_slice(
    folder: Path,
    num_layers: int,
    preset: Preset,
    divided_by: int = 1,
    num_ranks: int = 1,
    quantization: QuantizationMethod = QuantizationMethod.INT4,
) -> tuple[Path, Path]:
    """Folders of a target of one dense and num_layers - 1 expert layers and of its EAGLE3 MLA draft.

    divided_by: what `DIVIDED_WIDTHS` are divided by, so that n ranks have the shapes of n * divided_by.
    num_ranks: how many divide the heads; a preset with fewer heads than that (tiny has 4) gets one a rank.
    """
    target = folder / f"{preset.value}-{num_layers}-layers"
    if not target.exists():
        make_checkpoint(
            target,
            preset=preset,
            num_layers=num_layers,
            quantization=quantization,
            draft=DraftKind.MLA,
            architecture=Architecture.KIMI_K25,
            has_weights=False,
        )
        for config in (target / "config.json", target / DRAFT_FOLDER / "config.json"):
            fields = _shared_out(json.loads(config.read_text()), divided_by, num_ranks)
            config.write_text(json.dumps(fields, indent=2))
    return target, target / DRAFT_FOLDER


def _shared_out(config: Any, divisor: int, num_ranks: int) -> Any:
    if not isinstance(config, dict):
        return config
    fields = {name: _shared_out(value, divisor, num_ranks) for name, value in config.items()}
    fields |= {name: fields[name] // divisor for name in DIVIDED_WIDTHS if name in fields}
    return fields | {name: max(fields[name], num_ranks) for name in HEADS if name in fields}
