"""The mixture of experts: who computes a row, and the computing.

Dimensions: T tokens of the step, H hidden, E experts, K experts a token.
"""

from typing import Protocol

from torch import Tensor

from kimi_kernels.weights import ExpertWeights, PackedExperts


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


class PackExperts(Protocol):
    """Lay a layer's experts out for `MoeExperts`, at load."""

    def __call__(self, weights: ExpertWeights) -> PackedExperts: ...


class MoeExperts(Protocol):
    """Sum over a token's chosen experts of weight * down(silu(gate(x)) * up(x)), in the order of `topk_ids`."""

    def __call__(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: PackedExperts, first_expert: int = 0
    ) -> Tensor:
        """
        Args:
            x: [T, H]. topk_ids: [T, K] int32, global ids. topk_weights: [T, K] float32.
            first_expert: global id of the first expert held here; choices of experts held elsewhere add nothing.
        """
        ...
