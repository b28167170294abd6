"""Matrix products on tiles of exactly 16 rows, so that a row's bits do not depend on the rows beside it.

A BLAS picks its code path, and with it the order of its sums, by the shape of the product and by how its operands lie
in memory. Here both are the same whatever the batch: rows are zero-padded to whole tiles, widths to multiples of 16,
and every operand begins on a 64-byte boundary (16 float32 rows of any width are whole multiples of 64 bytes).
"""

import torch
from torch import Tensor

TILE_ROWS = 16
ALIGNMENT_BYTES = 64


def ceil_to_tile(size: int) -> int:
    """The multiple of 16 at or above `size`."""
    return (size + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS


def tile_weight(weight: Tensor) -> Tensor:
    """Ready a weight for `multiply_tiles`, at load.

    Args:
        weight: [..., rows, columns], any float dtype and strides.
    Returns:
        [..., rows, columns] float32, contiguous, aligned, both zero-padded to multiples of 16; the argument itself if
        it is all that.
    """
    *leading, rows, columns = weight.shape
    shape = (*leading, ceil_to_tile(rows), ceil_to_tile(columns))
    if weight.shape == shape and _is_ready(weight):
        return weight
    padded = torch.zeros(shape, dtype=torch.float32, device=weight.device)
    padded[..., :rows, :columns] = weight
    return padded


def tile_rows(x: Tensor, width: int) -> Tensor:
    """Zero-pad rows to whole tiles.

    Args:
        x: [T, columns], any float dtype and strides, columns <= width.
    Returns:
        [T rounded up to 16, width] float32, contiguous, aligned; x itself if it is all that.
    """
    num_rows, columns = x.shape
    if columns == width and num_rows % TILE_ROWS == 0 and _is_ready(x):
        return x
    tiles = torch.zeros(ceil_to_tile(num_rows), width, dtype=torch.float32, device=x.device)
    if columns == width:
        tiles[:num_rows] = x
    else:
        tiles[:num_rows, :columns] = x
    return tiles


def multiply_tiles(tiles: Tensor, weight_t: Tensor) -> Tensor:
    """tiles @ weight_t, 16 rows at a time.

    Args:
        tiles: [a multiple of 16, in_features], as `tile_rows` makes it.
        weight_t: [in_features, out_features], the transpose of what `tile_weight` makes.
    """
    num_rows = tiles.shape[0]
    if num_rows == TILE_ROWS:
        return torch.mm(tiles, weight_t)
    out = torch.empty(num_rows, weight_t.shape[1], dtype=torch.float32, device=tiles.device)
    for tile, out_tile in zip(split_tiles(tiles), split_tiles(out), strict=True):
        torch.mm(tile, weight_t, out=out_tile)
    return out


def split_tiles(tiles: Tensor) -> tuple[Tensor, ...]:
    """[n * 16, width] -> n views [16, width]."""
    return tiles.view(tiles.shape[0] // TILE_ROWS, TILE_ROWS, tiles.shape[1]).unbind()


def _is_ready(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT_BYTES == 0
