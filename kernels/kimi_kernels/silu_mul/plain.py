"""The gated activation in torch, float32 inside."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from kimi_kernels.silu_mul.op import check_gate_up

SERIAL_ELEMENTS = 32_768
"""torch divides longer tensors among a CPU's threads, at places that need not be the ends of rows. What fills no vector
at the end of a part goes through a scalar exponential of other bits; a whole row always ends where it ends."""


def silu_mul(gate_up: Tensor) -> Tensor:
    """`SiluMul`."""
    check_gate_up(gate_up)
    if gate_up.dtype != torch.float32:
        return activate(gate_up.float()).to(gate_up.dtype)
    return activate(gate_up)


def activate(gate_up: Tensor) -> Tensor:
    """[T, 2 * I] float32 -> [T, I]."""
    rows_at_once = max(1, SERIAL_ELEMENTS // max(1, gate_up.shape[1]))
    if gate_up.shape[0] > rows_at_once:
        return torch.cat([activate(rows) for rows in torch.split(gate_up, rows_at_once)])
    gate, up = gate_up.chunk(2, dim=1)
    return silu(gate).mul_(up)
