"""The progress of a time-boxed stage, and the learning rate that follows from it."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kimi_nano.recipe import Budget

PRINT_EVERY_S = 2.0


@dataclass
class Pace:
    """Progress of one stage in [0, 1]: by steps where the budget counts steps, else by the clock."""

    budget: Budget
    started: float = field(default_factory=time.perf_counter)
    step: int = 0

    def restart_clock(self) -> None:
        """Leave out what went before, such as compilation: progress by the clock is then progress by steps."""
        self.started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def progress(self) -> float:
        if self.budget.steps:
            return self.step / self.budget.steps
        return min(1.0, self.seconds / self.budget.seconds)

    def learning_rate(self, peak: float, warmup_steps: int) -> float:
        """Linear warm-up over steps, constant for the first third, then linear to 2% of the peak."""
        warmup = min(1.0, (self.step + 1) / warmup_steps)
        return peak * warmup * max(0.02, min(1.0, 1.5 * (1 - self.progress)))


@dataclass
class Curve:
    """A stage's history; prints a line every two seconds."""

    name: str
    rows: list[dict[str, float]] = field(default_factory=list)
    _printed: float = 0.0

    def add(self, pace: Pace, **values: float) -> None:
        row = {"step": pace.step, "seconds": round(pace.seconds, 2), **{k: round(v, 5) for k, v in values.items()}}
        self.rows.append(row)
        if pace.seconds - self._printed >= PRINT_EVERY_S:
            self._printed = pace.seconds
            text = "  ".join(f"{name} {value:.4g}" for name, value in row.items() if name not in ("step", "seconds"))
            print(f"{self.name} {pace.progress:4.0%}  step {pace.step}  {pace.seconds:.0f} s  {text}", flush=True)


def adamw(parameters: list[torch.nn.Parameter], learning_rate: float) -> torch.optim.AdamW:
    """Weight decay on matrices only."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].is_cuda
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=learning_rate, betas=(0.9, 0.95), fused=fused
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
