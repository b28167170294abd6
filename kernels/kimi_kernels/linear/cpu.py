"""Linear layers for few rows on a CPU: weights in float16 where that loses nothing, else one float32 product a row."""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require_shape
from kimi_kernels.half_products import multiply_half, pack_half, settle
from kimi_kernels.linear import reference
from kimi_kernels.quantization.reference import dequantize
from kimi_kernels.row_products import aligned, keeps_rows_aligned, multiply_rows
from kimi_kernels.row_tiles import ceil_to_width
from kimi_kernels.weights import LinearWeight, PackedWeight

HALF_KIND = "cpu.float16"
FLOAT_KIND = "cpu.float32"


def pack_linear(weight: LinearWeight) -> PackedWeight:
    """`signatures.PackLinear`. A width that would misalign float32 rows goes to the reference."""
    plain = dequantize(weight)
    require_shape("weight", plain, None, None)
    kind, matrix = pack_matrix(plain.float())
    if matrix is None:
        return reference.pack_linear(plain)
    return PackedWeight(kind=kind, tensors=(matrix,), out_features=plain.shape[0], in_features=plain.shape[1])


def pack_matrix(weight: Tensor) -> tuple[str, Tensor | None]:
    """(kind, what `multiply` reads) of a float32 weight [out_features, in_features]; None where neither kind fits."""
    half = pack_half(weight)
    if half is not None:
        return HALF_KIND, half
    return FLOAT_KIND, float_matrix(weight)


def float_matrix(weight: Tensor) -> Tensor | None:
    """[1, in_features, out_features padded to 16]; None where rows of the inputs would not be aligned."""
    out_features, in_features = weight.shape
    if not keeps_rows_aligned(in_features):
        return None
    matrix = torch.zeros(1, in_features, ceil_to_width(out_features), dtype=torch.float32)
    matrix[0, :, :out_features] = weight.t()
    return matrix


def multiply(x: Tensor, kind: str, matrix: Tensor, out_features: int) -> Tensor:
    """x: [T, in_features] float32, T at least 1 -> [T, out_features], contiguous."""
    if kind == HALF_KIND:
        return multiply_half(x, matrix)
    out = multiply_rows(x, matrix)
    return out if out.shape[1] == out_features else out[:, :out_features].contiguous()


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """x @ weight.T (`signatures.Linear`).

    Raises:
        ValueError: x is not [T, in_features], or the weight was packed by another kernel set.
    """
    if weight.kind not in (HALF_KIND, FLOAT_KIND):
        return reference.linear(x, weight)
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        require_shape("x", x, None, weight.in_features)
    if x.dtype != torch.float32:
        return linear(x.float(), weight).to(x.dtype)
    if not len(x):
        return torch.empty(0, weight.out_features)
    return multiply(x, weight.kind, weight.tensors[0], weight.out_features)


def per_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """One product a row and head (`signatures.PerHeadLinear`).

    Raises:
        ValueError: x is not [T, N, in_features] for a weight [N, in_features, out_features].
    """
    is_float = x.dtype == weight.dtype == torch.float32
    if not is_float or x.shape[1:] != weight.shape[:2] or not _keeps_heads_aligned(weight):
        return reference.per_head_linear(x, weight)
    num_heads, _, out_features = weight.shape
    rows = settle(x).unsqueeze(2)
    if len(rows) == 1:
        return torch.bmm(rows[0], weight).view(1, num_heads, out_features)
    out = torch.empty(len(rows), num_heads, 1, out_features)
    # One batched product over the heads of a row: its shape is a constant of the model.
    for row, out_row in zip(rows.unbind(), out.unbind(), strict=True):
        torch.bmm(row, weight, out=out_row)
    return out.squeeze(2)


def _keeps_heads_aligned(weight: Tensor) -> bool:
    return keeps_rows_aligned(*weight.shape[1:]) and weight is aligned(weight)
