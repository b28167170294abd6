"""The norms in torch: float32 on a CPU, one pass for a row's length; other dtypes and devices in float64."""

import torch
from torch import Tensor

from kimi_kernels.constants import constant
from kimi_kernels.moe_experts.op import Terms
from kimi_kernels.moe_experts.plain import sum_terms
from kimi_kernels.rms_norm.op import check_add, check_chunks, check_concat, check_norm


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 or wider. weight broadcasts against x."""
    if x.is_cpu and x.dtype == torch.float32:
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(constant(eps), length, length, value=1.0 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight)
    # A GPU divides a row's sum among threads by how many rows there are: in float64 no result shows that.
    wide = x.double()
    mean_square = (wide * wide).sum(dim=-1, keepdim=True).div_(x.shape[-1])
    return wide * mean_square.add_(eps).rsqrt_() * weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`RmsNorm`."""
    check_norm(x, weight)
    return _rounded(normalize(x, weight, eps), x.dtype)


def add_rms_norm(
    x: Terms, residual: Tensor, weight: Tensor, eps: float, second: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`AddRmsNorm`."""
    if second is not None or not isinstance(x, Tensor):
        x = sum_terms(x, second)
    check_add(x, residual, weight, None)
    total = _rounded(x + residual, residual.dtype)
    return _rounded(normalize(total, weight, eps), x.dtype), total


def concat_rms_norm(a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor, eps: float) -> Tensor:
    """`ConcatRmsNorm`."""
    check_concat(a, a_weight, b, b_weight)
    return _rounded(torch.cat((normalize(a, a_weight, eps), normalize(b, b_weight, eps)), dim=1), a.dtype)


def chunked_rms_norm(x: Tensor, weights: Tensor, eps: float) -> Tensor:
    """`ChunkedRmsNorm`."""
    check_chunks(x, weights)
    return _rounded(normalize(x.reshape(x.shape[0], *weights.shape), weights, eps).flatten(1), x.dtype)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)
