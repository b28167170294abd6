"""Matrix products on tiles of a fixed number of rows, so that a row's bits do not depend on the rows beside it.

A BLAS picks its code path, and with it the order of its sums, by the shape of the product and by how its operands lie
in memory. Here both are the same whatever the batch: rows are zero-padded to whole tiles, widths to multiples of 16,
and every operand begins on a 64-byte boundary (16 float32 rows of any width are whole multiples of 64 bytes).
"""

import torch
from torch import Tensor

TILE_ROWS = {"cpu": 16, "cuda": 512}
"""Rows of a tile by device: on a GPU a launch takes longer than the product of many rows."""
WIDTH_MULTIPLE = 16
"""Widths in float32 that keep every row of a contiguous tensor on a 64-byte boundary."""
ALIGNMENT_BYTES = 64


def ceil_to(multiple: int, size: int) -> int:
    """The multiple at or above `size`."""
    return (size + multiple - 1) // multiple * multiple


def ceil_to_width(size: int) -> int:
    """The multiple of 16 at or above `size`."""
    return ceil_to(WIDTH_MULTIPLE, size)


def tile_weight(weight: Tensor) -> Tensor:
    """Ready a weight for `multiply_tiles`, at load.

    Args:
        weight: [..., rows, columns], any float dtype and strides.
    Returns:
        [..., rows, columns] float32, contiguous, aligned, both zero-padded to multiples of 16; the argument itself if
        it is all that.
    """
    *leading, rows, columns = weight.shape
    shape = (*leading, ceil_to_width(rows), ceil_to_width(columns))
    if weight.shape == shape and _is_ready(weight):
        return weight
    padded = torch.zeros(shape, dtype=torch.float32, device=weight.device)
    padded[..., :rows, :columns] = weight
    return padded


def tile_rows(x: Tensor, width: int, height: int) -> Tensor:
    """Zero-pad rows to whole tiles of `height` rows.

    Args:
        x: [T, columns], any float dtype and strides, columns <= width.
    Returns:
        [T rounded up to whole tiles, width] float32, contiguous, aligned; x itself if it is all that.
    """
    num_rows, columns = x.shape
    padded_rows = ceil_to(height, num_rows)
    if columns == width and num_rows == padded_rows and _is_ready(x):
        return x
    tiles = torch.zeros(padded_rows, width, dtype=torch.float32, device=x.device)
    if columns == width:
        tiles[:num_rows] = x
    else:
        tiles[:num_rows, :columns] = x
    return tiles


def multiply_tiles(tiles: Tensor, weight_t: Tensor, height: int) -> Tensor:
    """tiles @ weight_t, a tile of `height` rows at a time.

    Args:
        tiles: [whole tiles, in_features], as `tile_rows` makes it.
        weight_t: [in_features, out_features], the transpose of what `tile_weight` makes.
    """
    num_rows = tiles.shape[0]
    if num_rows == height:
        return torch.mm(tiles, weight_t)
    out = torch.empty(num_rows, weight_t.shape[1], dtype=torch.float32, device=tiles.device)
    for tile, out_tile in zip(split_tiles(tiles, height), split_tiles(out, height), strict=True):
        torch.mm(tile, weight_t, out=out_tile)
    return out


def split_tiles(tiles: Tensor, height: int) -> tuple[Tensor, ...]:
    """[n * height, width] -> n views [height, width]."""
    return tiles.view(tiles.shape[0] // height, height, tiles.shape[1]).unbind()


def _is_ready(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT_BYTES == 0
