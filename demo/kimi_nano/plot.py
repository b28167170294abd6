"""Loss curves of a training as one image."""

import json
from collections.abc import Sequence
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
    """Draw the target's loss, and each draft's divergence at its first and last step: those that the files have.

    Args:
        files: training.json, and others with further drafts; a draft in a later file replaces an earlier one.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    record: dict[str, object] = {}
    drafts: dict[str, list[dict[str, float]]] = {}
    for file in files:
        content = json.loads(file.read_text())
        record |= content
        drafts |= content.get("drafts", {})
    target = record.get("target", [])
    assert isinstance(target, list)
    panels = [_plot_target] * bool(target) + [_plot_drafts] * bool(drafts)
    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes, target, drafts)
    figure.savefig(image, dpi=110)


def _plot_target(axes: Any, target: Rows, drafts: dict[str, Rows]) -> None:
    axes.plot(smoothed([r["seconds"] for r in target]), smoothed([r["loss"] for r in target]))
    axes.set(title="target", xlabel="seconds", ylabel="cross entropy, nats a token", yscale="log")


def _plot_drafts(axes: Any, target: Rows, drafts: dict[str, Rows]) -> None:
    for name, rows in drafts.items():
        for step in (1, 4):
            losses = smoothed([row[f"loss_{step}"] for row in rows])
            axes.plot(smoothed([row["step"] for row in rows]), losses, label=f"{name}, step {step}")
    axes.set(title="drafts", xlabel="optimizer step", ylabel="KL(target || draft), nats a token")
    axes.legend()
