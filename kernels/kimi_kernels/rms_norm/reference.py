"""Reference of the norms: sums of squares in float64, one rounding to the argument's dtype."""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_float, require_shape
from kimi_kernels.choice_products import Terms, plain_sum


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float64.

    Args:
        x: [..., H]. weight: broadcasts against x.
    """
    wide = x.double()
    mean_square = (wide * wide).sum(dim=-1, keepdim=True).div_(x.shape[-1])
    return wide * mean_square.add_(eps).rsqrt_() * weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`signatures.RmsNorm`.

    Raises:
        ValueError: x is not [T, H] for a weight [H].
    """
    require_shape("weight", weight, None)
    require_shape("x", x, None, weight.shape[0])
    require_float("x", x)
    return normalize(x, weight, eps).to(x.dtype)


def add_rms_norm(
    x: Terms, residual: Tensor, weight: Tensor, eps: float, second: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`signatures.AddRmsNorm`. The norm is of the sum as returned, rounded to the residual's dtype.

    Raises:
        ValueError: x, residual and second are not all [T, H] for a weight [H].
    """
    x = plain_sum(x, second)
    require_shape("weight", weight, None)
    require_shape("x", x, None, weight.shape[0])
    require_shape("residual", residual, *x.shape)
    require_float("x", x)
    require_float("residual", residual)
    total = (x.float() + residual.float()).to(residual.dtype)
    return normalize(total, weight, eps).to(x.dtype), total


def concat_rms_norm(a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor, eps: float) -> Tensor:
    """`signatures.ConcatRmsNorm`.

    Raises:
        ValueError: a width does not fit its weight, or a and b differ in rows.
    """
    require_shape("a_weight", a_weight, None)
    require_shape("b_weight", b_weight, None)
    require_shape("a", a, None, a_weight.shape[0])
    require_shape("b", b, a.shape[0], b_weight.shape[0])
    require_float("a", a)
    require_float("b", b)
    return torch.cat((normalize(a, a_weight, eps), normalize(b, b_weight, eps)), dim=-1).to(a.dtype)


def chunked_rms_norm(x: Tensor, weights: Tensor, eps: float) -> Tensor:
    """`signatures.ChunkedRmsNorm`.

    Raises:
        ValueError: x is not [T, C * H] for weights [C, H].
    """
    require_shape("weights", weights, None, None)
    require(weights.shape[0] > 0, "weights", f"shape {list(weights.shape)}", "at least one chunk")
    require_shape("x", x, None, weights.shape[0] * weights.shape[1])
    require_float("x", x)
    return normalize(x.reshape(x.shape[0], *weights.shape), weights, eps).to(x.dtype).flatten(-2)
