"""The gated activation's contracts. T tokens of the step, I columns of a half."""

from typing import Protocol

import torch
from torch import Tensor

from kimi_kernels.argument_checks import refuse, require_columns, require_float, require_shape
from kimi_kernels.weights import PackedWeight


class SiluMul(Protocol):
    """silu(first half) * second half."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 * I], may be strided between rows -> [T, I]."""
        ...


class SiluDown(Protocol):
    """A feed-forward layer's activation and second product."""

    def __call__(self, gate_up: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
        """
        Args:
            gate_up: [T, 2 * I] of dtype, or float32 that is rounded to it first; may be strided between rows.
            weight: [out_features, I], packed by `PackLinear`.
            dtype: of the result.
        Returns:
            silu(first half) * second half, rounded to dtype, @ weight.T: [T, out_features].
        """
        ...


def check_gate_up(gate_up: Tensor) -> None:
    """Raise unless it is [T, 2 * I] of floats, columns contiguous."""
    if gate_up.dim() != 2:
        require_shape("gate_up", gate_up, None, None)
    if gate_up.shape[1] % 2:
        refuse("gate_up", f"{gate_up.shape[1]} columns", "an even number")
    require_float("gate_up", gate_up)
    require_columns("gate_up", gate_up)


def check_silu_down(gate_up: Tensor, weight: PackedWeight) -> None:
    """Raise unless gate_up is as in `check_gate_up` and fits the weight."""
    require_shape("gate_up", gate_up, None, 2 * weight.in_features)
    check_gate_up(gate_up)
