"""Kernel sets with synthetic routing or acceptance, for timing models with dummy weights. They serve no text."""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kimi_kernels.compositions import composed_route_silu_down
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.moe_route.op import RouteExperts
from kimi_kernels.sampling_inputs import SampleOutput, SamplingInputs, SamplingRows, VocabularyMap

MAX_DRAFT_TOKENS = 8
LATER_SHARE = 0.71
"""The factor by which acceptance falls from one position to the next with published drafts."""
_BISECTIONS = 60


def with_uniform_routing(kernels: KernelSet) -> KernelSet:
    """The set with every token sent to experts drawn uniformly at random (`synthetic.plain.route_uniform`)."""
    ops = _ops(kernels)
    routed = with_router(kernels, ops.route_uniform)
    return replace(routed, route_silu_down=ops.route_uniform_silu_down) if kernels.name == "triton" else routed


def with_router(kernels: KernelSet, route_experts: RouteExperts) -> KernelSet:
    """The set with another router, by itself and beside a product."""
    beside = composed_route_silu_down(route_experts, kernels.silu_down)
    return replace(kernels, route_experts=route_experts, route_silu_down=beside)


class ForcedSampling:
    """`sample_tokens` of a target whose draft tokens are accepted at random."""

    def __init__(self, kernels: KernelSet, chances: Tensor) -> None:
        """chances: [MAX_DRAFT_TOKENS + 1, MAX_DRAFT_TOKENS] float32, of a sequence with so many draft tokens and for
        each of them. Captured steps read this tensor; what is copied into it later holds for them too."""
        self.chances = chances
        self._sample, self._force = kernels.sample_tokens, _ops(kernels).force_acceptance

    def __call__(
        self,
        logits: Tensor,
        inputs: SamplingInputs,
        rows: SamplingRows,
        vocabulary_map: VocabularyMap | None = None,
        num_logprobs: int | None = None,
    ) -> SampleOutput:
        """See `SampleTokens`."""
        drawn = self._sample(logits, inputs, rows, vocabulary_map, num_logprobs)
        return replace(drawn, token_ids=self._force(drawn.token_ids, inputs, rows, self.chances))


def with_synthetic_acceptance(
    kernels: KernelSet, acceptance: float | Sequence[float], device: torch.device
) -> KernelSet:
    """The set, for a target, with draft tokens accepted at random.

    Rows are sampled and verified as ever; in between, a sampled token becomes its draft token, or another
    (`synthetic.plain.force_acceptance`).

    Args:
        acceptance: a length, 1 + accepted draft tokens, at least 1, that a round of any number of draft tokens emits on
            average (more than a round can emit accepts everything); or the chances by position, whatever the number.
    """
    return replace(kernels, sample_tokens=ForcedSampling(kernels, chances_of(acceptance).to(device)))


def chances_of(acceptance: float | Sequence[float]) -> Tensor:
    """[MAX_DRAFT_TOKENS + 1, MAX_DRAFT_TOKENS] float32, see `ForcedSampling`. Behind the last chance that is given each
    is LATER_SHARE of the one before."""
    if isinstance(acceptance, (int, float)):
        by_count = [[acceptance_chance(acceptance, k)] * MAX_DRAFT_TOKENS for k in range(MAX_DRAFT_TOKENS + 1)]
        return torch.tensor(by_count, dtype=torch.float32)
    chances = list(acceptance)
    while len(chances) < MAX_DRAFT_TOKENS:
        chances.append(LATER_SHARE * chances[-1])
    return torch.tensor([chances] * (MAX_DRAFT_TOKENS + 1), dtype=torch.float32)


def acceptance_chance(length: float, num_draft_tokens: int) -> float:
    """p with 1 + p + p^2 + ... + p^k = length: the chance that the next draft token is accepted, where each depends on
    the one before; 1 where k tokens are too few."""
    if length >= num_draft_tokens + 1:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        total = sum(middle**j for j in range(num_draft_tokens + 1))
        low, high = (middle, high) if total < length else (low, middle)
    return (low + high) / 2


def _ops(kernels: KernelSet) -> Any:
    """The module that matches the set: on a CPU nothing may need Triton-language."""
    module = "kernel" if kernels.name == "triton" else "plain"
    return importlib.import_module(f"kimi_kernels.synthetic.{module}")
