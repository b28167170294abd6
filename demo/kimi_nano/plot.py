"""Loss curves of a training as one image."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, float]]

SMOOTHING = 25
"""Steps that a point of the curve is the mean of."""


def smoothed(values: Sequence[float]) -> list[float]:
    """Means of consecutive groups of steps."""
    groups = [values[start : start + SMOOTHING] for start in range(0, len(values), SMOOTHING)]
    return [sum(group) / len(group) for group in groups]


def plot_curves(files: Sequence[Path], image: Path) -> None:
    """Draw the target's loss, what `unloop` punished, each draft's loss at its first and last step: what files have.

    Args:
        files: training.json, unloop_training.json, and others with further drafts; a draft in a later file replaces
            an earlier one.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves: dict[str, Rows] = {}
    drafts: dict[str, Rows] = {}
    for file in files:
        content = json.loads(file.read_text())
        curves |= {name: content[name] for name in ("target", "unloop") if content.get(name)}
        drafts |= content.get("drafts", {})
    panels: list[tuple[Callable[[Any, Any], None], Any]] = [(_PANELS[name], rows) for name, rows in curves.items()]
    if drafts:
        panels.append((_plot_drafts, drafts))
    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for (panel, values), axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes, values)
    figure.savefig(image, dpi=80)


def _plot_target(axes: Any, rows: Rows) -> None:
    axes.plot(smoothed([r["seconds"] for r in rows]), smoothed([r["loss"] for r in rows]))
    axes.set(title="target", xlabel="seconds", ylabel="cross entropy, nats a token", yscale="log")


def _plot_unloop(axes: Any, rows: Rows) -> None:
    written = [row for row in rows if "repeated_share" in row]
    axes.plot(smoothed([r["seconds"] for r in rows]), smoothed([r["loss"] for r in rows]), color="C0")
    axes.set(title="target, trained on against loops", xlabel="seconds")
    axes.set_ylabel("cross entropy, nats a token", color="C0")
    right = axes.twinx()
    right.plot([r["seconds"] for r in written], [r["repeated_share"] for r in written], color="C1")
    right.set_ylim(bottom=0)
    right.set_ylabel("share of its own greedy tokens that repeat", color="C1")


_PANELS: dict[str, Callable[[Any, Rows], None]] = {"target": _plot_target, "unloop": _plot_unloop}


def _plot_drafts(axes: Any, drafts: dict[str, Rows]) -> None:
    for name, rows in drafts.items():
        for step in (1, 4):
            losses = smoothed([row[f"loss_{step}"] for row in rows])
            axes.plot(smoothed([row["step"] for row in rows]), losses, label=f"{name}, step {step}")
    axes.set(title="drafts", xlabel="optimizer step", ylabel="loss: divergence in nats, later mixed", yscale="log")
    axes.legend()
