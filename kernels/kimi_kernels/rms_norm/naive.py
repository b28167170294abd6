"""The norms as their formulas say, in float64."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    mean_square = torch.einsum("th,th->t", wide, wide) / x.shape[1]
    return wide / (mean_square + eps).sqrt()[:, None] * weight.double()


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, second: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    added = x if second is None else (x.double() + second.double()).to(x.dtype)
    total = (added.double() + residual.double()).to(residual.dtype)
    return rms_norm(total, weight, eps), total


def concat_rms_norm(a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor, eps: float) -> Tensor:
    return torch.cat([rms_norm(a, a_weight, eps), rms_norm(b, b_weight, eps)], dim=1)


def chunked_rms_norm(x: Tensor, weights: Tensor, eps: float) -> Tensor:
    chunks = torch.split(x, weights.shape[1], dim=1)
    return torch.cat([rms_norm(chunk, weight, eps) for chunk, weight in zip(chunks, weights, strict=True)], dim=1)
