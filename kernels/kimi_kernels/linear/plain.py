"""The linear layers in torch: on a CPU one product a row, weights in float16 where that loses nothing; on a GPU, and
for widths that would misalign float32 rows, tiles of a fixed number of rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require_shape
from kimi_kernels.half_products import multiply_half, pack_half, settle
from kimi_kernels.linear.op import check_heads, check_linear
from kimi_kernels.quantization.plain import dequantize
from kimi_kernels.row_products import aligned, keeps_rows_aligned, multiply_rows
from kimi_kernels.row_tiles import TILE_ROWS, ceil_to_width, multiply_tiles, tile_rows, tile_weight
from kimi_kernels.weights import LinearWeight, PackedWeight

HALF_KIND = "plain.float16"
FLOAT_KIND = "plain.float32"
TILED_KIND = "plain.tiles"
KINDS = (HALF_KIND, FLOAT_KIND, TILED_KIND)


def pack_matrices(weights: Sequence[Tensor]) -> tuple[str, tuple[Tensor, ...]]:
    """The first kind that fits all of some float32 weights, [out_features, in_features], and what `multiply` reads."""
    for kind, pack in ((HALF_KIND, pack_half), (FLOAT_KIND, _float_matrix)):
        packed = [matrix for weight in weights if (matrix := pack(weight)) is not None]
        if len(packed) == len(weights):
            return kind, tuple(packed)
    return TILED_KIND, tuple(tile_weight(weight).t() for weight in weights)


def _float_matrix(weight: Tensor) -> Tensor | None:
    """[1, in_features, out_features padded to 16]; None on a GPU, and where rows of x would not be aligned."""
    out_features, in_features = weight.shape
    if not weight.is_cpu or not keeps_rows_aligned(in_features):
        return None
    matrix = torch.zeros(1, in_features, ceil_to_width(out_features), dtype=torch.float32)
    matrix[0, :, :out_features] = weight.t()
    return matrix


def multiply(x: Tensor, kind: str, matrix: Tensor, out_features: int, tiles: dict[str, int] = TILE_ROWS) -> Tensor:
    """x: [T, in_features] float32, T at least 1; tiles: their rows by device -> [T, out_features], contiguous."""
    if kind == HALF_KIND:
        return multiply_half(x, matrix)
    if kind == FLOAT_KIND:
        out = multiply_rows(x, matrix)
    else:
        height = tiles[x.device.type]
        out = multiply_tiles(tile_rows(x, matrix.shape[0], height), matrix, height)[: len(x)]
    return out if out.shape[1] == out_features else out[:, :out_features].contiguous()


def pack_linear(weight: LinearWeight) -> PackedWeight:
    """`PackLinear`."""
    plain = dequantize(weight)
    require_shape("weight", plain, None, None)
    kind, tensors = pack_matrices([plain.float()])
    return PackedWeight(kind=kind, tensors=tensors, out_features=plain.shape[0], in_features=plain.shape[1])


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """`Linear`."""
    check_linear(x, weight, KINDS)
    return _product(x, weight) if x.dtype == torch.float32 else _product(x.float(), weight).to(x.dtype)


def logits(x: Tensor, weight: PackedWeight) -> Tensor:
    """`Logits`."""
    check_linear(x, weight, KINDS)
    return _product(x.float(), weight)


def _product(x: Tensor, weight: PackedWeight) -> Tensor:
    if not len(x):
        return x.new_empty(0, weight.out_features)
    return multiply(x, weight.kind, weight.tensors[0], weight.out_features)


def per_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`PerHeadLinear`: one batched product over the heads, of a row or a tile; its shape is a constant of the model."""
    check_heads(x, weight)
    if not (x.is_cpu and x.dtype == weight.dtype == torch.float32 and _keeps_heads_aligned(weight)):
        return _multiply_head_tiles(x, tile_weight(weight), weight.shape[2])
    rows = settle(x).unsqueeze(2)
    if len(rows) == 1:
        return torch.bmm(rows[0], weight).view(1, len(weight), -1)
    out = torch.empty(*rows.shape[:3], weight.shape[2])
    for row, out_row in zip(rows.unbind(), out.unbind(), strict=True):
        torch.bmm(row, weight, out=out_row)
    return out.squeeze(2)


def _keeps_heads_aligned(weight: Tensor) -> bool:
    return keeps_rows_aligned(*weight.shape[1:]) and weight is aligned(weight)


def _multiply_head_tiles(x: Tensor, weight: Tensor, out_features: int) -> Tensor:
    num_tokens, num_heads, in_features = x.shape
    out = torch.empty(num_tokens, num_heads, out_features, dtype=x.dtype, device=x.device)
    height = TILE_ROWS[x.device.type]
    for start in range(0, num_tokens, height):
        count = min(height, num_tokens - start)
        tile = torch.zeros(num_heads, height, weight.shape[1], dtype=torch.float32, device=x.device)
        tile[:, :count, :in_features] = x[start : start + count].transpose(0, 1)
        out[start : start + count] = torch.bmm(tile, weight)[:, :count, :out_features].transpose(0, 1)
    return out
