"""The rotary embedding's contract. T tokens of the step, N heads, R the part of a head that is rotated."""

from typing import Protocol

import torch
from torch import Tensor

from kimi_kernels.argument_checks import refuse, require_columns, require_float, require_shape


class Rope(Protocol):
    """Rotate each head by its row's position (Su et al. 2021)."""

    def __call__(self, x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
        """
        Args:
            x: [T, N, R], may be strided but for its columns; R even.
            cos_sin: [max_positions, R] float32, contiguous: cosines of the R / 2 frequencies, then their sines.
            positions: [T] int64.
            interleaved: pairs are (2i, 2i + 1) if true, (i, i + R / 2) if false. The result keeps the pairing.
        """
        ...


def check_rope(x: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """Raise unless the arguments are those of `Rope`."""
    if x.dim() != 3:
        require_shape("x", x, None, None, None)
    require_float("x", x)
    require_columns("x", x)
    num_tokens, _, width = x.shape
    if width % 2:
        refuse("x", f"{width} columns", "an even number")
    check_rotation(cos_sin, width, positions, num_tokens)


def check_rotation(cos_sin: Tensor, width: int, positions: Tensor, num_tokens: int) -> None:
    """Raise unless the table and the positions fit `num_tokens` rows of `width` columns."""
    if cos_sin.dim() != 2 or cos_sin.shape[1] != width:
        require_shape("cos_sin", cos_sin, None, width)
    if cos_sin.dtype != torch.float32:
        refuse("cos_sin", cos_sin.dtype, "torch.float32")
    if not cos_sin.is_contiguous():
        refuse("cos_sin", f"strides {cos_sin.stride()}", "a contiguous tensor")
    check_row_numbers("positions", positions, num_tokens)


def check_row_numbers(name: str, numbers: Tensor, num_tokens: int) -> None:
    """Raise unless they are [num_tokens] int64."""
    if numbers.shape != (num_tokens,):
        require_shape(name, numbers, num_tokens)
    if numbers.dtype != torch.int64:
        refuse(name, numbers.dtype, "torch.int64")
