"""The dense feed-forward layer: down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020).

| tensor | shape |
|---|---|
| gate_proj.weight, up_proj.weight | [intermediate_size, hidden_size] |
| down_proj.weight | [hidden_size, intermediate_size] |
"""

import torch

from kimi_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from kimi_backend.layers.weight_loader import WeightLoader


class DenseMlp:
    """SwiGLU with gate and up stacked in one matrix; each rank holds a slice of the intermediate width."""

    def __init__(self, loader: WeightLoader, hidden_size: int, intermediate_size: int) -> None:
        shape = (intermediate_size, hidden_size)
        self._gate_up = ColumnParallelLinear.load(loader, [("gate_proj", shape), ("up_proj", shape)])
        self._down = RowParallelLinear.load(loader, "down_proj", (hidden_size, intermediate_size))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden_size] -> this rank's term of the sum over ranks, [T, hidden_size]."""
        return self._down.after_silu(self._gate_up(x), x.dtype)
