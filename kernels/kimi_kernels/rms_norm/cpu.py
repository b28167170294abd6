"""The norms in float32: one pass for a row's length, no copy to float64. Other dtypes run on the reference."""

import torch
from torch import Tensor

from kimi_kernels.choice_products import Terms, plain_sum
from kimi_kernels.constants import constant
from kimi_kernels.rms_norm import reference


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, which keeps its place with size 1."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(constant(eps), length, length, value=1.0 / x.shape[-1]).rsqrt_()


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Tell whether x is [T, H] for a weight [H], both float32."""
    return x.dtype == weight.dtype == torch.float32 and x.dim() == 2 and x.shape[1:] == weight.shape


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`signatures.RmsNorm`.

    Raises:
        ValueError: x is not [T, H] for a weight [H].
    """
    if not _fits(x, weight):
        return reference.rms_norm(x, weight, eps)
    return (x * inverse_rms(x, eps)).mul_(weight)


def add_rms_norm(
    x: Terms, residual: Tensor, weight: Tensor, eps: float, second: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`signatures.AddRmsNorm`.

    Raises:
        ValueError: x, residual and second are not all [T, H] for a weight [H].
    """
    x = plain_sum(x)
    others = (residual,) if second is None else (residual, second)
    fits = all(part.dtype == torch.float32 and part.shape == x.shape for part in others)
    if not fits or not _fits(x, weight):
        return reference.add_rms_norm(x, residual, weight, eps, second)
    total = (x if second is None else x + second) + residual
    return (total * inverse_rms(total, eps)).mul_(weight), total


def concat_rms_norm(a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor, eps: float) -> Tensor:
    """`signatures.ConcatRmsNorm`.

    Raises:
        ValueError: a width does not fit its weight, or a and b differ in rows.
    """
    if len(a) != len(b) or not _fits(a, a_weight) or not _fits(b, b_weight):
        return reference.concat_rms_norm(a, a_weight, b, b_weight, eps)
    return torch.cat(((a * inverse_rms(a, eps)).mul_(a_weight), (b * inverse_rms(b, eps)).mul_(b_weight)), dim=1)


def chunked_rms_norm(x: Tensor, weights: Tensor, eps: float) -> Tensor:
    """`signatures.ChunkedRmsNorm`.

    Raises:
        ValueError: x is not [T, C * H] for weights [C, H].
    """
    if x.dtype != torch.float32 or weights.dtype != torch.float32 or x.shape[1:] != (weights.numel(),):
        return reference.chunked_rms_norm(x, weights, eps)
    chunks = x.reshape(x.shape[0], *weights.shape)
    return (chunks * inverse_rms(chunks, eps)).mul_(weights).flatten(-2)
