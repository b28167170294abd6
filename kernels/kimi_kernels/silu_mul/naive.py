"""The gated activation as its formula says, in float64."""

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=1)
    return gate * torch.sigmoid(gate) * up
