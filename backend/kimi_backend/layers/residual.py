"""The residual stream: a layer's output is summed over the ranks, added and normed in one step."""

from dataclasses import dataclass

import torch

from kimi_backend.parallel import TensorParallelGroup
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.moe_experts.op import Terms


@dataclass(frozen=True, slots=True)
class RankTerms:
    """This rank's terms, [T, hidden_size] each, of what a layer adds to the residual stream: not summed yet, neither
    with one another nor over the ranks."""

    first: Terms
    second: torch.Tensor | None = None
    """The second term, where two parts of a layer add to the same rows."""


def add_rms_norm(
    terms: RankTerms,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    kernels: KernelSet,
    group: TensorParallelGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a layer's output to the residual stream, and norm the sum.

    Args:
        residual: [T, hidden_size]. weight: [hidden_size].
    Returns:
        (normed, residual stream), [T, hidden_size] each, on every rank.
    """
    if group.size == 1:
        return kernels.add_rms_norm(terms.first, residual, weight, eps, terms.second)
    if group.all_reduce_norm is not None and group.all_reduce_norm.takes(terms.first):
        return group.all_reduce_norm(terms.first, residual, weight, eps, terms.second)
    term = kernels.sum_terms(terms.first, terms.second)
    return kernels.add_rms_norm(group.all_reduce(term), residual, weight, eps)
