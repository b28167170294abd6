"""The rotary embedding in torch, float32 inside, with tables laid out once a model."""

from functools import lru_cache

import torch
from torch import Tensor

from kimi_kernels.rope.op import check_rope

FEW_ROWS = 16
"""The most rows whose angles are kept from one layer to the next."""


@lru_cache(maxsize=16)
def rotation_table(cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Per position the cosine of every column, then its sine, negative where the pair's first value stands.

    Args:
        cos_sin: [max_positions, R] float32; a constant of the model, known again by its identity.
    Returns:
        [max_positions, 2, R].
    """
    cos, sin = cos_sin.chunk(2, dim=-1)
    if interleaved:
        columns = torch.stack((cos, cos), dim=-1).flatten(-2), torch.stack((-sin, sin), dim=-1).flatten(-2)
    else:
        columns = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return torch.stack(columns, dim=1)


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """[T, N, R] float32, any strides, rotated by its row's position."""
    if len(positions) > FEW_ROWS:
        cos, sin = _gather(cos_sin, interleaved, positions)
    else:
        cos, sin = _gather_few(cos_sin, interleaved, tuple(positions.tolist()))
    return (x * cos).add_(_swap_pairs(x, interleaved).mul_(sin))


def _gather(cos_sin: Tensor, interleaved: bool, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of the positions, each [T, 1, R]."""
    cos, sin = rotation_table(cos_sin, interleaved).index_select(0, positions).unsqueeze(2).unbind(1)
    return cos, sin


@lru_cache(maxsize=64)
def _gather_few(cos_sin: Tensor, interleaved: bool, positions: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """All layers of a step ask for the same; by value, since static arrays are written again each step."""
    return _gather(cos_sin, interleaved, torch.tensor(positions, dtype=torch.int64, device=cos_sin.device))


@lru_cache(maxsize=16)
def _partners(shape: torch.Size, device: torch.device) -> Tensor:
    """1, 0, 3, 2, ... of every row: the other column of each column's pair."""
    return torch.arange(shape[-1], device=device).view(-1, 2).flip(-1).flatten().expand(shape)


def _swap_pairs(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return x.gather(-1, _partners(x.shape, x.device))
    return x.roll(x.shape[-1] // 2, -1)


def rope(x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """`Rope`."""
    check_rope(x, cos_sin, positions)
    if x.dtype != torch.float32:
        return rotate(x.float(), cos_sin, positions, interleaved).to(x.dtype)
    return rotate(x, cos_sin, positions, interleaved)
