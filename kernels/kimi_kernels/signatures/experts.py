"""The mixture of experts: who computes a row, and the computing.

Dimensions: T tokens of the step, H hidden, E experts, K experts a token.
"""

from typing import Protocol

from torch import Tensor

from kimi_kernels.choice_products import Terms
from kimi_kernels.weights import ExpertWeights, PackedExperts


class PackExperts(Protocol):
    """Lay a layer's experts out for `MoeExperts`, at load."""

    def __call__(self, weights: ExpertWeights) -> PackedExperts: ...


class MoeExperts(Protocol):
    """Sum over a token's chosen experts of weight * down(silu(gate(x)) * up(x)), in the order of `topk_ids`."""

    def __call__(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: PackedExperts, first_expert: int = 0
    ) -> Terms:
        """
        Args:
            x: [T, H]. topk_ids: [T, K] int32, global ids. topk_weights: [T, K] float32.
            first_expert: global id of the first expert held here; choices of experts held elsewhere add nothing.
        Returns:
            [T, H], or the products that `SumTerms`, `AddRmsNorm` and sums over ranks make it of.
        """
        ...


class SumTerms(Protocol):
    """The op that sums what `MoeExperts` left to be summed, and adds another term to it."""

    def __call__(self, terms: Terms, second: Tensor | None = None) -> Tensor:
        """
        Args:
            terms: [T, H], a tensor or products of choices; their sum is rounded to their dtype.
            second: [T, H] of that dtype; added then, and rounded again.
        Returns:
            [T, H]; a tensor alone is returned as it is.
        """
        ...
