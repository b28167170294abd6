"""Linear layers for few rows on a CPU: one product a row. Widths that would misalign rows run on the reference."""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require_shape
from kimi_kernels.linear import reference
from kimi_kernels.quantization.reference import dequantize
from kimi_kernels.row_products import aligned, keeps_rows_aligned, multiply_rows
from kimi_kernels.row_tiles import ceil_to_tile
from kimi_kernels.weights import PackedWeight, Weight

PACKED_KIND = "cpu.float32"


def pack_linear(weight: Weight) -> PackedWeight:
    """Keep the weight input-major in float32, its columns zero-padded to a multiple of 16 (`signatures.PackLinear`)."""
    plain = dequantize(weight)
    require_shape("weight", plain, None, None)
    out_features, in_features = plain.shape
    if not keeps_rows_aligned(in_features):
        return reference.pack_linear(plain)
    matrix = torch.zeros(1, in_features, ceil_to_tile(out_features), dtype=torch.float32, device=plain.device)
    matrix[0, :, :out_features] = plain.t()
    return PackedWeight(kind=PACKED_KIND, tensors=(matrix,), out_features=out_features, in_features=in_features)


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """x @ weight.T (`signatures.Linear`).

    Raises:
        ValueError: x is not [T, in_features], or the weight was packed by another kernel set.
    """
    if weight.kind != PACKED_KIND:
        return reference.linear(x, weight)
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        require_shape("x", x, None, weight.in_features)
    if x.dtype != torch.float32:
        return linear(x.float(), weight).to(x.dtype)
    out = multiply_rows(x, weight.tensors[0])
    return out if out.shape[1] == weight.out_features else out[:, : weight.out_features].contiguous()


def per_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """One product a row and head (`signatures.PerHeadLinear`).

    Raises:
        ValueError: x is not [T, N, in_features] for a weight [N, in_features, out_features].
    """
    is_float = x.dtype == weight.dtype == torch.float32
    if not is_float or x.shape[1:] != weight.shape[:2] or not _keeps_heads_aligned(weight):
        return reference.per_head_linear(x, weight)
    num_heads, _, out_features = weight.shape
    rows = aligned(x).unsqueeze(2)
    if len(rows) == 1:
        return torch.bmm(rows[0], weight).view(1, num_heads, out_features)
    out = torch.empty(len(rows), num_heads, 1, out_features)
    # One batched product over the heads of a row: its shape is a constant of the model.
    for row, out_row in zip(rows.unbind(), out.unbind(), strict=True):
        torch.bmm(row, weight, out=out_row)
    return out.squeeze(2)


def _keeps_heads_aligned(weight: Tensor) -> bool:
    return keeps_rows_aligned(*weight.shape[1:]) and weight is aligned(weight)
