"""The gated activation in float32."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from kimi_kernels.silu_mul import reference

SERIAL_ELEMENTS = 32_768
"""torch divides longer tensors among its threads, at places that need not be the ends of rows. What fills no vector at
the end of a part goes through a scalar exponential of other bits; a whole row always ends where it ends."""


def silu_mul(gate_up: Tensor) -> Tensor:
    """`signatures.SiluMul`.

    Raises:
        ValueError: gate_up is not [T, 2 * I].
    """
    if gate_up.dim() != 2 or gate_up.dtype != torch.float32 or gate_up.shape[1] % 2 or gate_up.shape[1] == 0:
        return reference.silu_mul(gate_up)
    rows_at_once = max(1, SERIAL_ELEMENTS // gate_up.shape[1])
    if len(gate_up) > rows_at_once:
        return torch.cat([silu_mul(rows) for rows in torch.split(gate_up, rows_at_once)])
    gate, up = gate_up.chunk(2, dim=1)
    return silu(gate).mul_(up)
