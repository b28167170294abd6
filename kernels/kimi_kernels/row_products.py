"""Matrix products of one row at a time in one call, so that a row's bits do not depend on the rows beside it.

A batched product gives every item a product of its own, and an item here is one row: its shape is a constant of the
model, whatever the number of rows. For the few rows of a decode step this reads each weight from a near cache and
wastes no arithmetic on padding, so it beats tiles of 16 rows (`row_tiles`) two to five times; for long prompts tiles
win.
"""

from functools import reduce
from operator import or_

import torch
from torch import Tensor

from kimi_kernels.row_tiles import ALIGNMENT_BYTES, WIDTH_MULTIPLE


def keeps_rows_aligned(*widths: int) -> bool:
    """Tell whether rows of all these widths begin on 64-byte boundaries."""
    return reduce(or_, widths) % WIDTH_MULTIPLE == 0  # the lowest bits of all: one call, not one a width


def aligned(x: Tensor) -> Tensor:
    """x itself if it is contiguous and begins on a 64-byte boundary, else such a copy."""
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def multiply_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Every row of x times one matrix.

    Args:
        x: [T, in_features] float32, any strides. weight: [1, in_features, out_features] float32, contiguous, aligned.
            Both widths keep rows aligned.
    Returns:
        [T, out_features].
    """
    num_rows = x.shape[0]
    matrices = weight if num_rows == 1 else weight.expand(num_rows, -1, -1)
    return torch.bmm(aligned(x).unsqueeze(1), matrices).squeeze(1)
