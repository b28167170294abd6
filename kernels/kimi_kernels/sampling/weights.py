"""Integer weights of tokens, and which tokens min-p, top-k and top-p leave (docs/sampling.md, "Weights", "Filters").

Mass is summed over integers, so that the order of summation cannot matter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_kernels.sampling.constants import EXP2_COEFFICIENTS, LOG2_E, MIN_EXP2_ARGUMENT, WEIGHT_BITS
from kimi_kernels.sampling_inputs import SamplingInputs

NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterParams:
    """Filters of R rows, each [R, 1]."""

    top_k: Tensor
    """int64, 0 keeps all."""
    top_p: Tensor
    """float64, 1 or more keeps all."""
    min_p: Tensor
    """float64, 0 keeps all."""

    @staticmethod
    def of_rows(inputs: SamplingInputs, sequence: Tensor) -> "FilterParams | None":
        """Filters of the rows' sequences; None if no sequence of the batch filters."""
        if not (bool(inputs.top_k.any()) or bool((inputs.top_p < 1.0).any()) or bool(inputs.min_p.any())):
            return None
        return FilterParams(
            top_k=inputs.top_k[sequence, None].long(),
            top_p=inputs.top_p[sequence, None].double(),
            min_p=inputs.min_p[sequence, None].double(),
        )


def token_weights(scaled: Tensor) -> Tensor:
    """exp(y - max y) in units of 2^-31, rounded down.

    Args:
        scaled: [R, C] float32, logits over temperature; -inf for banned tokens, at least one finite value a row.
    Returns:
        [R, C] int64 in [0, 2^31].
    """
    return weights_below(scaled - scaled.amax(dim=1, keepdim=True))


def weights_below(below_best: Tensor) -> Tensor:
    """`token_weights` of y - max y, any shape."""
    exponent = (below_best * LOG2_E).clamp(min=MIN_EXP2_ARGUMENT)
    whole = exponent.floor()
    fraction = exponent - whole
    polynomial = fraction * EXP2_COEFFICIENTS[0]
    for coefficient in EXP2_COEFFICIENTS[1:]:
        polynomial = (polynomial + coefficient) * fraction
    mantissa = ((polynomial + 1.0) * 2.0**23).to(torch.int64)  # a float32 in [1, 2) has 23 bits after the point
    return (mantissa << (WEIGHT_BITS - 23)) >> (-whole).to(torch.int64)


def surviving_tokens(scaled: Tensor, filters: FilterParams) -> Tensor:
    """The tokens that may be drawn.

    Args:
        scaled: [R, C] float32 as in `token_weights`, columns by ascending token id.
    Returns:
        [R, C] bool; at least one a row.
    """
    weights = token_weights(scaled)
    alive = scaled > NEGATIVE_INFINITY
    alive &= weights.to(torch.float64) >= filters.min_p * 2.0**WEIGHT_BITS
    if not bool(((filters.top_k > 0) | (filters.top_p < 1.0)).any()):
        return alive
    ordered, order = torch.where(alive, scaled, NEGATIVE_INFINITY).sort(dim=1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    keep = (ordered > NEGATIVE_INFINITY) & ((filters.top_k <= 0) | (rank < filters.top_k))
    ordered_weights = torch.where(keep, weights.gather(1, order), 0)
    mass = ordered_weights.cumsum(dim=1)
    # The first of a group of equal logits has exactly the group's mass above it.
    is_first = torch.ones_like(keep)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = torch.where(is_first, rank, 0).cummax(dim=1).values
    mass_above = (mass - ordered_weights).gather(1, first)
    limit = filters.top_p * mass[:, -1:].to(torch.float64)
    keep &= (filters.top_p >= 1.0) | (mass_above == 0) | (mass_above.to(torch.float64) < limit)
    return torch.zeros_like(alive).scatter_(1, order, keep)
