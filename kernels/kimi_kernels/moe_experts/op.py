"""The routed experts' contracts.

Dimensions: T tokens of the step, H hidden, E experts held here, I intermediate, K experts a token.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kimi_kernels.argument_checks import refuse, require_dtype, require_float, require_shape
from kimi_kernels.weights import ExpertWeights, PackedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOutputs:
    """The output of each token-expert pair, which stands for each token's weighted sum: whoever reads that next may sum
    in passing."""

    outputs: Tensor
    """[T * K, H]; rows of experts held elsewhere, and of padding, hold anything."""
    topk_ids: Tensor
    """[T, K] int32, global ids."""
    topk_weights: Tensor
    """[T, K] float32."""
    first_expert: int
    """Global id of the first expert held here."""
    num_experts: int
    """The number of experts held here; others add nothing."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the sum."""
        return torch.Size((self.topk_ids.shape[0], self.outputs.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.outputs.dtype


Terms = Tensor | ExpertOutputs
"""[T, H], or what sums to it."""


class PackExperts(Protocol):
    """Lay a layer's experts out for `MoeExperts`, at load."""

    def __call__(self, weights: ExpertWeights) -> PackedExperts: ...


class MoeExperts(Protocol):
    """Sum over a token's experts of weight * down(silu(gate(x)) * up(x)), in the order of `topk_ids`."""

    def __call__(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: PackedExperts, first_expert: int = 0
    ) -> Terms:
        """
        Args:
            x: [T, H], of any strides. topk_ids: [T, K] int32, global ids. topk_weights: [T, K] float32.
            first_expert: global id of the first expert held here; experts held elsewhere, and ids of -1, add nothing.
        Returns:
            [T, H], or the outputs that `SumTerms`, `AddRmsNorm` and sums over ranks make it of.
        """
        ...


class SumTerms(Protocol):
    """The op that sums what `MoeExperts` left to be summed, and adds another term to it."""

    def __call__(self, terms: Terms, second: Tensor | None = None) -> Tensor:
        """
        Args:
            terms: [T, H], a tensor or outputs of experts; their sum is rounded to their dtype.
            second: [T, H] of that dtype; added then, and rounded again.
        Returns:
            [T, H]; a tensor alone is returned as it is.
        """
        ...


def check_weights(weights: ExpertWeights) -> None:
    """Raise unless gate_up is [E, 2 * I, H] for a down of [E, H, I]."""
    require_shape("down", weights.down, None, None, None)
    num_experts, hidden_size, intermediate_size = weights.down.shape
    require_shape("gate_up", weights.gate_up, num_experts, 2 * intermediate_size, hidden_size)


def check_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: PackedExperts, kinds: Collection[str]
) -> None:
    """Raise unless the arguments are those of `MoeExperts`, K at least 1, for experts packed as one of `kinds`."""
    if experts.kind not in kinds:
        refuse("experts", f"experts packed as {experts.kind!r}", f"one of {sorted(kinds)}")
    ids = topk_ids.shape
    if len(ids) != 2 or x.shape != (ids[0], experts.hidden_size) or topk_weights.shape != ids or not ids[1]:
        require_shape("x", x, None, experts.hidden_size)
        require_shape("topk_ids", topk_ids, x.shape[0], None)
        require_shape("topk_weights", topk_weights, *ids)
        refuse("topk_ids", "0 experts a token", "at least 1")
    require_float("x", x)
    require_dtype("topk_ids", topk_ids, torch.int32)
    require_dtype("topk_weights", topk_weights, torch.float32)


def check_second(terms: Terms, second: Tensor) -> None:
    """Raise unless the second term has the sum's shape and dtype."""
    require_shape("second", second, *terms.shape)
    require_dtype("second", second, terms.dtype)
