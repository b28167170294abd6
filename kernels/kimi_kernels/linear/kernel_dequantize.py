"""A weight's tiles dequantised to plain rows, for products of so many rows that cuBLAS is faster than reading few
bytes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_kernels.quantization.kernel_tiles import FP8_WORDS, INT4_WORDS, TILE_ROWS, fp8_plane, int4_plane
from kimi_kernels.quantization.tiles import step_columns

SLICE_TILES = 64
"""Row tiles that are dequantised at once: 8,192 rows, so that the dequantised part of any matrix stays near 100 MB."""


@triton.jit
def dequantize_kernel(
    TILES,
    SCALES,
    OUT,
    num_rows,
    num_columns,
    num_steps,
    KIND: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    """One program a tile: 128 rows and one step of columns, written to OUT [num_rows, num_columns]."""
    step = tl.program_id(0)
    row_tile = tl.program_id(1)
    row = tl.arange(0, TILE_ROWS)
    tile = row_tile.to(tl.int64) * num_steps + step
    out_row = row_tile * TILE_ROWS + row
    target = OUT + out_row.to(tl.int64)[:, None] * num_columns
    if KIND == "int4":
        word = tl.arange(0, INT4_WORDS)
        words = tl.load(TILES + tile * (TILE_ROWS * INT4_WORDS) + row[:, None] * INT4_WORDS + word[None, :])
        packed = tl.load(SCALES + tile * TILE_ROWS + row)
        for p in tl.static_range(4):
            # A bf16 is the upper half of the float32 of the same value.
            scale = ((packed >> (16 * p)).to(tl.int32) << 16).to(tl.float32, bitcast=True)
            values = int4_plane(words, p, PORTABLE).to(tl.float32) * scale[:, None]
            column = step * (4 * INT4_WORDS) + p * INT4_WORDS + word
            mask = (out_row < num_rows)[:, None] & (column < num_columns)[None, :]
            tl.store(target + column[None, :], values.to(OUT.dtype.element_ty), mask=mask)
    else:
        word = tl.arange(0, FP8_WORDS)
        words = tl.load(TILES + tile * (TILE_ROWS * FP8_WORDS) + row[:, None] * FP8_WORDS + word[None, :])
        scale = tl.load(SCALES + tile * TILE_ROWS + row)
        for p in tl.static_range(2):
            values = fp8_plane(words, p, PORTABLE).to(tl.float32) * scale[:, None]
            column = step * (2 * FP8_WORDS) + p * FP8_WORDS + word
            mask = (out_row < num_rows)[:, None] & (column < num_columns)[None, :]
            tl.store(target + column[None, :], values.to(OUT.dtype.element_ty), mask=mask)


def dequantized_linear(x: Tensor, tiles: Tensor, scales: Tensor, kind: str, out_features: int) -> Tensor:
    """x @ weight.T by cuBLAS, the weight dequantised to x's dtype, a slice of its rows after the other.

    Args:
        x: [T, in_features]. tiles, scales: of one matrix, see `quantization.tiles`.
    """
    num_rows, in_features = x.shape
    out = x.new_empty(num_rows, out_features)
    row_tiles, num_steps = tiles.shape[1:3]
    assert num_steps == triton.cdiv(in_features, step_columns(kind)), "the tiles are those of this width"
    for first in range(0, row_tiles, SLICE_TILES):
        last = min(first + SLICE_TILES, row_tiles)
        start, stop = first * 128, min(last * 128, out_features)
        weight = x.new_empty(stop - start, in_features)
        dequantize_kernel[(num_steps, last - first)](
            tiles[0, first], scales[0, first], weight, stop - start, in_features, num_steps, KIND=kind,
            PORTABLE=x.dtype != torch.bfloat16 or x.device.type != "cuda",
        )  # fmt: skip
        torch.mm(x, weight.t(), out=out[:, start:stop])
    return out
