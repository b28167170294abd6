"""`kimi inspect`: what a checkpoint is, whether its files are whole, and how many tokens a GPU has room for."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_backend.config.linear_format import LinearFormat

if TYPE_CHECKING:
    from rich.table import Table

_GIB = 1 << 30
_MAX_GIB = 1e6


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the target's checkpoint.")],
    draft: Annotated[Path | None, typer.Option(help="Folder of the draft's checkpoint.")] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="GiB of one GPU to plan for.", min=0.001, max=_MAX_GIB)
    ] = None,
    tp: Annotated[int, typer.Option(help="GPUs that share the models.", min=1)] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.", min=1)] = 64,
    kv_dtype: Annotated[str, typer.Option(help="KV element type.")] = "bfloat16",
    max_model_len: Annotated[int, typer.Option(help="Longest sequence; 0 takes the checkpoint's.", min=0)] = 0,
    draft_vocab: Annotated[int, typer.Option(help="Tokens that the draft's head keeps; 0: all.", min=0)] = 0,
    draft_quantization: Annotated[
        LinearFormat, typer.Option(help="Format that the draft is rounded to at load.")
    ] = LinearFormat.NONE,
    draft_head_quantization: Annotated[
        LinearFormat | None, typer.Option(help="Format of the draft's head, if another.")
    ] = None,
    values: Annotated[bool, typer.Option(help="Read every scale, norm and bias in search of NaN.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a checkpoint is, check its files against its config, and plan a GPU's memory.

    Configs and tokenizer files alone will do: fetch those first, and the weights when the plan fits. Exits with 1 when
    it does not, with 2 when a file is wrong.
    """
    import torch

    from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
    from kimi_backend.cli import checkpoint_report
    from kimi_backend.config.memory_plan import MemorySettings
    from kimi_backend.config.mla_dims import kv_item_bytes

    kv_item_bytes(kv_dtype)  # refuses what is no KV type, even if no plan is asked for
    has_weights, no_device = checkpoint_report.has_weights, torch.device("meta")
    target = TargetCheckpoint.open(path) if has_weights(path) else TargetCheckpoint.dummy(path, no_device)
    draft_checkpoint = None
    if draft is not None and has_weights(draft):
        draft_checkpoint = DraftCheckpoint.open(draft, target.config)
    elif draft is not None:
        draft_checkpoint = DraftCheckpoint.dummy(draft, target.config, no_device)
    if values:
        checkpoint_report.check_all_values(target, draft_checkpoint)
    report: dict[str, Any] = {"target": checkpoint_report.report_target(target)}
    report["text"] = checkpoint_report.report_text(path, target.config)
    if draft_checkpoint is not None:
        report["draft"] = checkpoint_report.report_draft(draft_checkpoint, tp)
    if gpu_memory is not None:
        settings = MemorySettings(
            gpu_bytes=int(gpu_memory * _GIB),
            tp_size=tp,
            block_size=block_size,
            kv_cache_dtype=kv_dtype,
            max_model_len=max_model_len,
            draft_format=draft_quantization,
            draft_head_format=draft_head_quantization,
        )
        report["memory_plan"] = checkpoint_report.report_memory(target.config, draft_checkpoint, settings, draft_vocab)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print_tables(report)
    raise typer.Exit(0 if report.get("memory_plan", {}).get("fits", True) else 1)


def _print_tables(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    for title, values in report.items():
        console.print(_table(title.replace("_", " "), values))


def _table(title: str, values: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None, title_style="bold")
    for name, value in values.items():
        table.add_row(name.replace("_", " "), _text(name, value))
    return table


def _text(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text('', item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("_bytes"):
        return f"{value:,} ({value / _GIB:.3f} GiB)"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6f}" if isinstance(value, float) else str(value)
