"""Loss curves of a training as one image."""

import json
from collections.abc import Sequence
from pathlib import Path

SMOOTHING = 25
"""Steps that a point of the curve is the mean of."""


def smoothed(values: Sequence[float]) -> list[float]:
    """Means of consecutive groups of steps."""
    groups = [values[start : start + SMOOTHING] for start in range(0, len(values), SMOOTHING)]
    return [sum(group) / len(group) for group in groups]


def plot_curves(files: Sequence[Path], image: Path) -> None:
    """Draw the target's loss, and each draft's divergence at each unrolled step.

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
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    target = record.get("target", [])
    assert isinstance(target, list)
    left.plot(smoothed([r["seconds"] for r in target]), smoothed([r["loss"] for r in target]))
    left.set(title="target", xlabel="seconds", ylabel="cross entropy, nats a token", yscale="log")
    for name, rows in drafts.items():
        for step in (1, 4):
            losses = smoothed([row[f"loss_{step}"] for row in rows])
            right.plot(smoothed([row["step"] for row in rows]), losses, label=f"{name}, step {step}")
    right.set(title="drafts", xlabel="optimizer step", ylabel="KL(target || draft), nats a token")
    right.legend()
    figure.savefig(image, dpi=110)
