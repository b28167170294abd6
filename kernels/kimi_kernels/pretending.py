"""Kernel sets that pretend, for timing models whose weights mean nothing. They serve no text."""

import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import SampleOutput, SamplingInputs, SamplingRows, VocabularyMap

MAX_DRAFT_TOKENS = 8
_BISECTIONS = 60


def with_uniform_routing(kernels: KernelSet) -> KernelSet:
    """The set with every token sent to experts drawn uniformly at random (`pretences.reference.route_uniform`)."""
    return replace(kernels, route_experts=_ops(kernels).route_uniform)


def with_synthetic_acceptance(kernels: KernelSet, length: float, device: torch.device) -> KernelSet:
    """The set, for a target, with draft tokens accepted at random so that a round emits `length` tokens on average.

    Rows are sampled and verified as ever; in between, a sampled token becomes its draft token, or another
    (`pretences.reference.force_acceptance`).

    Args:
        length: 1 + accepted draft tokens, at least 1; more than a round can emit accepts everything.
    """
    chances = torch.tensor(
        [acceptance_chance(length, k) for k in range(MAX_DRAFT_TOKENS + 1)], dtype=torch.float32, device=device
    )
    force = _ops(kernels).force_acceptance

    def sample_tokens(
        logits: Tensor,
        inputs: SamplingInputs,
        rows: SamplingRows,
        vocabulary_map: VocabularyMap | None = None,
        num_logprobs: int | None = None,
    ) -> SampleOutput:
        drawn = kernels.sample_tokens(logits, inputs, rows, vocabulary_map, num_logprobs)
        return replace(drawn, token_ids=force(drawn.token_ids, inputs, rows, chances))

    return replace(kernels, sample_tokens=sample_tokens)


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
    module = "kernel" if kernels.name == "triton" else "reference"
    return importlib.import_module(f"kimi_kernels.pretences.{module}")
