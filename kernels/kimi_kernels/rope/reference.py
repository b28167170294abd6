"""Reference of the rotary embedding: float32, no fused multiply-add."""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_dtype, require_float, require_shape


def rope(x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """`signatures.Rope`.

    Raises:
        ValueError: x is not [T, N, R], cos_sin not [max_positions, R] float32, or positions not [T] int64.
    """
    require_shape("x", x, None, None, None)
    num_tokens, _, width = x.shape
    require(width % 2 == 0, "x", f"{width} columns", "an even number")
    require_float("x", x)
    check_rotation("cos_sin", cos_sin, width, positions, num_tokens)
    return rotate(x, cos_sin.index_select(0, positions).unsqueeze(1), interleaved).to(x.dtype)


def check_rotation(name: str, cos_sin: Tensor, width: int, positions: Tensor, num_tokens: int) -> None:
    """Raise unless the table and the positions fit `num_tokens` rows of `width` columns."""
    require_shape(name, cos_sin, None, width)
    require_dtype(name, cos_sin, torch.float32)
    require_shape("positions", positions, num_tokens)
    require_dtype("positions", positions, torch.int64)


def rotate(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Turn each pair of the last dimension by its row's angles.

    Args:
        x: [..., R]. cos_sin: [..., R] float32, broadcasts against x: R / 2 cosines, then R / 2 sines.
    Returns:
        [..., R] float32.
    """
    cos, sin = cos_sin.chunk(2, dim=-1)
    wide = x.float()
    if interleaved:
        even, odd = wide[..., 0::2], wide[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    first, second = wide.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
