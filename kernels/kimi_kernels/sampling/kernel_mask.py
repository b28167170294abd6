# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Masks of rows: -inf for what a row may not draw, in place. A row without a mask leaves at its first load."""

import triton
import triton.language as tl
from torch import Tensor

from kimi_kernels.sampling.kernel_noise import is_not_finite
from kimi_kernels.sampling.kernel_tuning import TUNING, Splits


@triton.jit
def mask_kernel(
    LOGITS,
    LOGIT_MASK,
    MASK_OF_ROW,
    TOKEN_OF_COLUMN,
    num_columns,
    mask_stride,
    SPLITS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_MAP: tl.constexpr,
    KEEPS_BAD: tl.constexpr,
):
    """Rule out, in place, what one split of a row may not draw.

    Args:
        LOGITS: [R, num_columns] float32. LOGIT_MASK: [M, mask_stride] int32. MASK_OF_ROW: [R] int32, -1 for none.
        KEEPS_BAD: whether NaN and +inf stay.
    """
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    place = tl.load(MASK_OF_ROW + row)
    if place >= 0:
        start = split * SPLIT_COLUMNS
        stop = tl.minimum(start + SPLIT_COLUMNS, num_columns)
        for at in tl.range(start, stop, BLOCK):
            column = at + tl.arange(0, BLOCK)
            mask = column < stop
            token = column
            if HAS_MAP:
                token = tl.load(TOKEN_OF_COLUMN + column, mask=mask, other=0).to(tl.int32)
            word = tl.load(LOGIT_MASK + place.to(tl.int64) * mask_stride + token // 32, mask=mask, other=-1)
            is_banned = mask & (((word >> (token % 32)) & 1) == 0)
            target = LOGITS + row.to(tl.int64) * num_columns + column
            if KEEPS_BAD:
                is_banned = is_banned & (is_not_finite(tl.load(target, mask=mask, other=0.0)) == 0)
            tl.store(target, -float("inf"), mask=is_banned)


def mask_in_place(
    logits: Tensor,
    logit_mask: Tensor,
    mask_of_row: Tensor,
    *,
    keeps_bad: bool,
    token_of_column: Tensor | None = None,
) -> None:
    """Launch `mask_kernel`.

    Args:
        logits: [R, num_columns] float32, contiguous.
        logit_mask, mask_of_row: see `SamplingRows`.
        token_of_column: [num_columns] int64 the token of each column; None: column c is token c.
    """
    num_rows, num_columns = logits.shape
    splits = Splits.of(num_rows, num_columns, TUNING)
    mask_kernel[(num_rows * splits.count,)](
        logits, logit_mask, mask_of_row, mask_of_row if token_of_column is None else token_of_column, num_columns,
        logit_mask.stride(0), SPLITS=splits.count, SPLIT_COLUMNS=splits.columns, BLOCK=TUNING.read_columns,
        HAS_MAP=token_of_column is not None, KEEPS_BAD=keeps_bad,
    )  # fmt: skip
