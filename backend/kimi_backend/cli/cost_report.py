"""The costs of steps on this machine, and how many tokens `speculation_policy = adaptive` drafts for that."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kimi_backend.spec_decode.acceptance import chances
from kimi_backend.spec_decode.round_times import RoundTimes
from kimi_backend.spec_decode.row_choice import choose_rows
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS
from kimi_backend.types.step_costs import StepCosts

BATCH_SIZES = (1, 4, 16, 64)
TYPICAL_RATES = {"high": (0.85, 0.67, 0.48), "middling": (0.6, 0.5, 0.4), "low": (0.3, 0.2, 0.1)}
"""Share of draft tokens 1, 2, 3 that is accepted where those before were; further ones as the last."""
NUM_CONTEXT_TOKENS = 1024
"""The context of each sequence."""

Report = dict[str, Any]


def kept_costs_report(checkpoint: Path, draft: Path | None) -> Report | None:
    """The costs that were kept last for these checkpoints, by this version; None where there are none."""
    from kimi_backend.runners.cost_file import newest_costs  # torch, which who asks a server does without

    given = {"checkpoint": str(checkpoint.resolve()), "draft": "" if draft is None else str(draft.resolve())}
    found = {role: newest_costs(role, given) for role in ("target", "draft")}
    kept = {role: costs for role, costs in found.items() if costs is not None}
    device = kept["target"][0]["device"] if "target" in kept else ""
    return costs_report({role: costs for role, (_, costs) in kept.items()}, device)


def costs_report(costs: dict[str, StepCosts], where: str) -> Report | None:
    """Those of the target, and of the draft if there is one; None without any.

    Args:
        where: they were timed.
    """
    if "target" not in costs:
        return None
    report: Report = {"device": where, "target": _steps(costs["target"])}
    if "draft" in costs:
        report |= {"draft": _steps(costs["draft"]), "choices": choices(costs["target"], costs["draft"])}
    return report


def _steps(costs: StepCosts) -> Report:
    """Milliseconds by number of sequences and by rows of each, and of drawing all proposals."""
    steps = {
        str(size): {str(length): round(us / 1e3, 4) for length, us in zip(costs.query_lens, row, strict=True)}
        for size, row in zip(costs.num_seqs, costs.step_us, strict=True)
    }
    proposals = zip(costs.num_seqs, costs.proposals_us, strict=False)
    return {
        "step_ms": steps,
        "proposals_ms": {str(size): [round(us / 1e3, 4) for us in row] for size, row in proposals},
    }


def choices(target: StepCosts, draft: StepCosts) -> list[Report]:
    """The numbers of tokens that the policy takes for equal sequences, with each of `TYPICAL_RATES`.

    Batches are those that were timed. Times are of the models alone: the host's is learned while serving.
    """
    times = RoundTimes(target, draft)
    if target.is_captured:
        times.assume_overlapped()
    found = []
    for size in BATCH_SIZES:
        for name, first in TYPICAL_RATES.items() if size <= target.num_seqs[-1] else ():
            rates = np.array([*first, *[first[-1]] * (MAX_SPECULATIVE_TOKENS - len(first))])
            likely = chances(np.tile(rates, (size, 1)), [1.0] * size, [target.query_lens[-1] - 1] * size)
            choice = choose_rows(likely, size, size * NUM_CONTEXT_TOKENS, times)
            found.append(
                {
                    "num_seqs": size,
                    "acceptance": name,
                    "num_draft_tokens": round(float(choice.num_draft_tokens.mean()), 2),
                    "tokens_per_second": round(choice.tokens_per_s, 1),
                    "without_a_draft": round(choice.plain_tokens_per_s, 1),
                }
            )
    return found


def print_costs(console: Console, report: Report | None) -> None:
    """Tables of the report, or a line on why there are none."""
    if report is None:
        console.print("step costs: none are kept for these checkpoints; a server times its steps at its first start")
        return
    for model in ("target", "draft"):
        if model in report:
            console.print(f"{model}'s steps, ms by rows of each sequence ({report['device']})", style="bold")
            console.print(_step_table(report[model]))
    if "choices" in report:
        rates = ", ".join(f"{name} {' '.join(map(str, first))}" for name, first in TYPICAL_RATES.items())
        console.print(f"draft tokens that are chosen by acceptance ({rates}), and the gain", style="bold")
        console.print(_choice_table(report["choices"]))


def _table(columns: list[str]) -> Table:
    table = Table(box=None)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _step_table(of_model: Report) -> Table:
    steps, proposals = of_model["step_ms"], of_model["proposals_ms"]
    lengths = list(next(iter(steps.values())))
    most = len(next(iter(proposals.values()), ()))
    further = [f"{most} proposals" if most > 1 else "proposal"] if most else []
    table = _table(["sequences", *lengths, *further])
    for size, row in steps.items():
        drawn = [f"+ {proposals[size][-1]:.3f}"] if most else []
        table.add_row(size, *[f"{milliseconds:.3f}" for milliseconds in row.values()], *drawn)
    return table


def _choice_table(found: list[Report]) -> Table:
    table = _table(["sequences", *TYPICAL_RATES])
    for size in BATCH_SIZES:
        chosen = [item for item in found if item["num_seqs"] == size]
        if chosen:
            table.add_row(str(size), *map(_chosen_text, chosen))
    return table


def _chosen_text(item: Report) -> str:
    faster = item["tokens_per_second"] / item["without_a_draft"] - 1
    return f"{item['num_draft_tokens']:g} ({faster:+.0%})"
