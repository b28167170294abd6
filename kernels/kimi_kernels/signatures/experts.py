"""The mixture of experts: who computes a row, and the computing.

Dimensions: T tokens of the step, H hidden, E experts, K experts a token.
"""

from typing import Protocol

import torch
from torch import Tensor

from kimi_kernels.choice_products import Terms
from kimi_kernels.weights import ExpertWeights, PackedExperts, PackedWeight


class RouteExperts(Protocol):
    """DeepSeek-V3's router (report, section 2.1.2): sigmoid scores, bias for the choice only, groups, top-k."""

    def __call__(
        self,
        router_logits: Tensor,
        correction_bias: Tensor,
        *,
        top_k: int,
        num_groups: int,
        topk_groups: int,
        renormalize: bool,
        scaling_factor: float,
        slot_mapping: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            router_logits: [T, E] float32. correction_bias: [E] float32.
            num_groups, topk_groups: only experts of the topk_groups best groups may be chosen; a group's score is the
                sum of its two best biased scores.
            slot_mapping: [T] int64; a row whose slot is -1 is padding and takes no expert: its ids are -1.
        Returns:
            topk_ids: [T, K] int32, best first, lowest id first among equals.
            topk_weights: [T, K] float32, unbiased scores, renormalised to sum 1 if asked, times scaling_factor.
        """
        ...


class RouteSiluDown(Protocol):
    """`RouteExperts` and `SiluDown` of columns of one product, neither of which reads the other's result."""

    def __call__(
        self,
        router_logits: Tensor,
        correction_bias: Tensor,
        gate_up: Tensor,
        weight: PackedWeight,
        dtype: torch.dtype,
        *,
        top_k: int,
        num_groups: int,
        topk_groups: int,
        renormalize: bool,
        scaling_factor: float,
        slot_mapping: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All arguments as of the two ops; topk_ids, topk_weights and the product, [T, out_features]."""
        ...


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
