"""`kimi probe`: which setting a draft was trained with, by what the target accepts of it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_backend.cli.setting_options import setting_options

if TYPE_CHECKING:
    from kimi_backend.probe.probing import ProbeResult

SHOWN_ROWS = 12


@setting_options(only=("tensor_parallel_size", "device", "kernels"), panel="Settings of the models")
def probe_command(
    settings: dict[str, str],
    checkpoint: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the target's checkpoint.")],
    draft: Annotated[Path, typer.Option(help="Folder of the draft's checkpoint.")],
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with prompt or input_ids; by default eight short built-in ones.")
    ] = None,
    num_tokens: Annotated[int, typer.Option(help="Tokens the target writes after each prompt.", min=8)] = 64,
    num_speculative_tokens: Annotated[int, typer.Option("-k", help="Draft tokens a round.", min=1, max=7)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a draft under every plausible setting and say which one it was trained with.

    Aux layer encodings × rotary variants × norm flags. Exits with 1 when the file's own setting is clearly worse than
    the best one.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from kimi_backend.cli.prompt_file import read_prompt_token_ids
    from kimi_backend.config.settings import ServingSettings
    from kimi_backend.probe.probing import ranking, verdict
    from kimi_backend.probe.ranks import ProbeJob, opened_on_ranks
    from kimi_backend.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(checkpoint)
    token_ids = read_prompt_token_ids(prompts, tokenizer)
    served = ServingSettings.from_parameters({**settings, "checkpoint": str(checkpoint), "draft": str(draft)}, {})
    job = ProbeJob(
        settings=served, prompts=tuple(token_ids), num_tokens=num_tokens, num_draft_tokens=num_speculative_tokens
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    results = []
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        opened_on_ranks(job) as opened,
    ):
        task = progress.add_task("the target writes", total=len(token_ids))
        texts = opened.write_texts(token_ids, num_tokens, lambda: progress.advance(task))
        task = progress.add_task("settings", total=len(opened.candidates))
        for result in opened.run(texts, num_speculative_tokens):
            results.append(result)
            progress.advance(task)
    report = _report(ranking(results), verdict(results)[1], opened.config_aux)
    typer.echo(json.dumps(report, indent=2) if as_json else _text(report))
    raise typer.Exit(0 if report["file_is_right"] else 1)


def _report(ranked: "list[ProbeResult]", rivals: "list[ProbeResult]", aux: tuple[int, ...]) -> dict[str, Any]:
    best = max(ranked, key=lambda result: result.acceptance_length)
    own = next(result for result in ranked if result.setting.is_files_own)
    return {
        "trained_with": _as_json(ranked[0], best),
        "file": {**_as_json(own, best), "aux_layer_ids": list(aux)},
        "file_is_right": own is ranked[0],
        "not_told_apart": [rival.setting.name for rival in rivals],
        "settings": [_as_json(result, best) for result in ranked],
    }


def _as_json(result: "ProbeResult", best: "ProbeResult") -> dict[str, Any]:
    overrides = result.setting.overrides
    names = ("aux_layer_ids", "rope_theta", "beta_fast", "interleaved", "fc_norm", "norm_output")
    return {
        "setting": result.setting.name,
        "acceptance_length": round(result.acceptance_length, 4),
        "standard_errors_below_best": round(best.errors_above(result), 2),
        "overrides": {name: getattr(overrides, name) for name in names if getattr(overrides, name) is not None},
    }


def _text(report: dict[str, Any]) -> str:
    lines, num_left = ["accepted  below best  setting"], len(report["settings"]) - SHOWN_ROWS
    for row in report["settings"][:SHOWN_ROWS]:
        lines.append(f"{row['acceptance_length']:8.3f}  {row['standard_errors_below_best']:7.1f} SE  {row['setting']}")
    if num_left > 0:
        lines.append(f"... and {num_left} more")
    chosen, rivals = report["trained_with"], report["not_told_apart"]
    if rivals:
        lines.append(
            f"Not told apart by these prompts: the first {len(rivals) + 1}, in the order of how little of the file they"
            " change. More prompts tell more."
        )
    if report["file_is_right"]:
        lines.append(f"Nothing is clearly better than what the file says: {chosen['setting']}")
    else:
        lines.append(f"The draft was trained with: {chosen['setting']}")
        lines.append(f"Its file says otherwise. Serve it with these overrides: {json.dumps(chosen['overrides'])}")
    return "\n".join(lines)
