"""`kimi make-checkpoint`: a random target and its draft in the real file format, for tests, demos and measurements."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kimi_backend.checkpoint.new_folder import new_folder
from kimi_backend.checkpoint.presets import (
    Architecture,
    DraftKind,
    Preset,
    default_num_layers,
    draft_config_json,
    max_model_len,
    target_config_json,
    vocab_size,
)
from kimi_backend.config.quantization_config import QuantizationMethod

DRAFT_FOLDER = "draft"


def make_checkpoint_command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder; the draft goes into its `draft` folder.")],
    preset: Annotated[Preset, typer.Option(help="Size of the model.")] = Preset.TINY,
    layers: Annotated[int | None, typer.Option(help="Layers of the target; by default 4 (tiny) or 2.", min=1)] = None,
    quantization: Annotated[QuantizationMethod, typer.Option(help="Format of the weights.")] = QuantizationMethod.INT4,
    draft: Annotated[DraftKind, typer.Option(help="Kind of draft.")] = DraftKind.MLA,
    architecture: Annotated[Architecture, typer.Option(help="Layout of the target's files.")] = Architecture.KIMI_K25,
    seed: Annotated[int, typer.Option(help="The same seed makes the same files.", min=0)] = 0,
    shard_gb: Annotated[float, typer.Option(help="Most gigabytes of a file.", min=0.000001, max=1e6)] = 5.0,
    weights: Annotated[bool, typer.Option(help="Without: configs and tokenizer only, for --load-format dummy.")] = True,
) -> None:
    """Write a random target in OUT and its draft in OUT/draft, as real checkpoints are laid out."""
    make_checkpoint(
        out,
        preset=preset,
        num_layers=layers if layers is not None else default_num_layers(preset),
        quantization=quantization,
        draft=draft,
        architecture=architecture,
        seed=seed,
        shard_bytes=int(shard_gb * 10**9),
        has_weights=weights,
    )
    typer.echo(f"{out}: {preset.value} target ({quantization.value}) and {draft.value} draft; kimi inspect {out}")


def make_checkpoint(
    out: Path,
    *,
    preset: Preset,
    num_layers: int,
    quantization: QuantizationMethod,
    draft: DraftKind,
    architecture: Architecture,
    seed: int = 0,
    shard_bytes: int = 5 * 10**9,
    has_weights: bool = True,
) -> None:
    """Write both checkpoints, a few megabytes in memory at a time; `out` appears when all of it is there.

    Raises:
        CheckpointError: `out` holds something already, or cannot be written.
    """
    with new_folder(out) as folder:
        from kimi_backend.checkpoint.random_checkpoint import write_config, write_random_draft, write_random_target
        from kimi_backend.text.tiktoken_files import write_tokenizer

        tokenizer = asdict(write_tokenizer(folder, vocab_size(preset), max_model_len=max_model_len(preset)))
        token_ids = {name: tokenizer[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        if architecture is Architecture.KIMI_K25:
            token_ids["media_placeholder_token_id"] = tokenizer["media_placeholder_token_id"]
        target_json = target_config_json(preset, num_layers, quantization, architecture, token_ids)
        draft_json = draft_config_json(draft, preset, num_layers)
        if not has_weights:
            write_config(folder, target_json)
            write_config(folder / DRAFT_FOLDER, draft_json)
            return
        target = write_random_target(folder, target_json, seed=seed, shard_bytes=shard_bytes)
        write_random_draft(folder / DRAFT_FOLDER, draft_json, target, seed=seed + 1, shard_bytes=shard_bytes)
