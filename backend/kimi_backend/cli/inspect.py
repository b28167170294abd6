"""`kimi inspect`: what a checkpoint is, whether its files are whole, what a GPU has room for, what steps cost."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_backend.cli.setting_options import setting_options

if TYPE_CHECKING:
    from rich.table import Table

_GIB = 1 << 30


PLANNED_BY = (
    "tensor_parallel_size",
    "gpu_memory_gib",
    "block_size",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_speculative_tokens",
    "draft_vocab",
    "draft_quantization",
    "draft_head_quantization",
)
"""Settings that the memory plan depends on."""


@setting_options(only=PLANNED_BY, panel="Settings of the memory plan")
def inspect(
    settings: dict[str, str],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the target's checkpoint.")],
    draft: Annotated[Path | None, typer.Option(help="Folder of the draft's checkpoint.")] = None,
    values: Annotated[bool, typer.Option(help="Read every scale, norm and bias in search of NaN.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a checkpoint is, check its files against its config, and plan a GPU's memory.

    Configs and tokenizer files alone will do: fetch those first, and the weights when the plan fits. Exits with 1 when
    it does not, with 2 when a file is wrong. Plans where --gpu-memory-gib is given. Where a server has timed its steps
    on this machine, shows what they cost and how many tokens it drafts for that.
    """
    import torch

    from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
    from kimi_backend.cli import checkpoint_report
    from kimi_backend.cli.cost_report import kept_costs_report
    from kimi_backend.config.memory_plan import MemorySettings
    from kimi_backend.config.settings import ServingSettings
    from kimi_backend.runners.load.draft_choice import head_format, linear_format

    chosen = ServingSettings.from_parameters(settings, {})
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
        report["draft"] = checkpoint_report.report_draft(draft_checkpoint, chosen.tensor_parallel_size)
    if chosen.gpu_memory_gib:
        num_rows = chosen.max_speculative_tokens + 1 if draft_checkpoint is not None else 1
        plan = MemorySettings(
            gpu_bytes=int(chosen.gpu_memory_gib * _GIB),
            tp_size=chosen.tensor_parallel_size,
            block_size=chosen.block_size,
            kv_cache_dtype="bfloat16" if chosen.kv_cache_dtype == "auto" else chosen.kv_cache_dtype,
            max_model_len=chosen.max_model_len,
            max_num_seqs=chosen.max_num_seqs,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            max_num_sampled_rows=chosen.max_num_seqs * num_rows,
            draft_format=linear_format(chosen),
            draft_head_format=head_format(chosen),
        )
        report["memory_plan"] = checkpoint_report.report_memory(
            target.config, draft_checkpoint, plan, chosen.draft_vocab
        )
    if (costs := kept_costs_report(path, draft)) is not None:
        report["step_costs"] = costs
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print_tables(report)
    raise typer.Exit(0 if report.get("memory_plan", {}).get("fits", True) else 1)


def _print_tables(report: dict[str, Any]) -> None:
    from rich.console import Console

    from kimi_backend.cli.cost_report import print_costs

    console = Console()
    for title, values in report.items():
        if title != "step_costs":
            console.print(_table(title.replace("_", " "), values))
    print_costs(console, report.get("step_costs"))


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
