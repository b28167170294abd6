"""The collectives by their definitions, in float64: of the tensors of all ranks, in rank order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_kernels.rms_norm import naive


def all_reduce(terms: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(terms)).double().sum(dim=0).to(terms[0].dtype)


def all_gather(columns: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(columns), dim=1)


def all_reduce_norm(terms: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return naive.add_rms_norm(all_reduce(terms), residual, weight, eps)
