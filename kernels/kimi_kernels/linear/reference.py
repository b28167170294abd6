"""Reference of the linear layers: float32 products on tiles of a fixed number of rows."""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_float, require_shape
from kimi_kernels.quantization.reference import dequantize
from kimi_kernels.row_tiles import TILE_ROWS, multiply_tiles, tile_rows, tile_weight
from kimi_kernels.weights import LinearWeight, PackedWeight

PACKED_KIND = "reference.float32"


def pack_linear(weight: LinearWeight) -> PackedWeight:
    """Keep the weight's transpose in float32 (`signatures.PackLinear`)."""
    plain = dequantize(weight)
    require_shape("weight", plain, None, None)
    out_features, in_features = plain.shape
    return PackedWeight(
        kind=PACKED_KIND, tensors=(tile_weight(plain).t(),), out_features=out_features, in_features=in_features
    )


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """x @ weight.T (`signatures.Linear`).

    Raises:
        ValueError: x is not [T, in_features], or the weight was packed by another kernel set.
    """
    if weight.kind != PACKED_KIND:
        raise ValueError(f"weight: got a weight packed as {weight.kind!r}, expected {PACKED_KIND!r}")
    require_shape("x", x, None, weight.in_features)
    require_float("x", x)
    num_tokens = x.shape[0]
    weight_t = weight.tensors[0]
    out = multiply_tiles(tile_rows(x, weight_t.shape[0]), weight_t)
    return out[:num_tokens, : weight.out_features].to(x.dtype).contiguous()


def per_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """One product a head and tile of rows (`signatures.PerHeadLinear`).

    Raises:
        ValueError: x is not [T, N, in_features] for a weight [N, in_features, out_features].
    """
    require_shape("weight", weight, None, None, None)
    num_heads, in_features, out_features = weight.shape
    require_shape("x", x, None, num_heads, in_features)
    require_float("x", x)
    require_float("weight", weight)
    require(x.device == weight.device, "weight", weight.device, f"the device of x, {x.device}")
    num_tokens = x.shape[0]
    weight = tile_weight(weight)
    out = torch.empty(num_tokens, num_heads, out_features, dtype=x.dtype, device=x.device)
    height = TILE_ROWS[x.device.type]
    for start in range(0, num_tokens, height):
        count = min(height, num_tokens - start)
        tile = torch.zeros(num_heads, height, weight.shape[1], dtype=torch.float32, device=x.device)
        tile[:, :count, :in_features] = x[start : start + count].transpose(0, 1)
        # One batched product over the heads: its shape is a constant of the model.
        out[start : start + count] = torch.bmm(tile, weight)[:, :count, :out_features].transpose(0, 1)
    return out
