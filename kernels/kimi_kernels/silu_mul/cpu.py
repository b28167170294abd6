"""The gated activation in float32."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from kimi_kernels.silu_mul import reference

VECTOR_STRIDE = 32
"""torch's vector loop takes so many float32 at a time at most; what is left over goes through a scalar exponential of
other bits. Rows of a multiple have no such rest, so a value's bits do not depend on where its row lies."""


def silu_mul(gate_up: Tensor) -> Tensor:
    """`signatures.SiluMul`.

    Raises:
        ValueError: gate_up is not [T, 2 * I].
    """
    if gate_up.dim() != 2 or gate_up.dtype != torch.float32 or gate_up.shape[1] % (2 * VECTOR_STRIDE):
        return reference.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return silu(gate).mul_(up)
