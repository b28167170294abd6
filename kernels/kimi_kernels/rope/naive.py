"""The rotary embedding as its formula says: each pair of values is a complex number, turned by an angle."""

import torch
from torch import Tensor


def rope(x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    half = x.shape[2] // 2
    turn = torch.complex(cos_sin[positions, :half].double(), cos_sin[positions, half:].double())
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = torch.complex(first.double(), second.double()) * turn[:, None]
    if interleaved:
        return torch.view_as_real(turned).flatten(2)
    return torch.cat([turned.real, turned.imag], dim=2)
