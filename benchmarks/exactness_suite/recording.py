"""A kernel set that keeps how close each decision was: the draw's two best scores, the router's last place."""

import dataclasses

import torch
from torch import Tensor

from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling.gumbel import gumbel_from_bits
from kimi_kernels.sampling.philox import noise_bits
from kimi_kernels.sampling_inputs import (
    GREEDY_TEMPERATURE,
    SampleOutput,
    SamplingInputs,
    SamplingRows,
    VocabularyMap,
)
from kimi_kernels.synthetic_sets import with_router


@dataclasses.dataclass(frozen=True, slots=True)
class Decisions:
    """One step's."""

    token_ids: Tensor
    """[R] drawn."""
    score_gaps: Tensor
    """[R] float64: best minus second of log p + noise."""
    router_gaps: Tensor
    """[T] float32, of each row: the smallest over the expert layers of the last chosen expert's score minus the first
    one's that was not chosen."""


class Recorder:
    """Wraps a kernel set; `take` returns what was decided since it was called last."""

    def __init__(self, kernels: KernelSet) -> None:
        self._inner = kernels
        self._router_gaps: list[Tensor] = []
        self._draws: list[tuple[Tensor, Tensor]] = []
        self.kernels = dataclasses.replace(with_router(kernels, self._route), sample_tokens=self._sample)

    def take(self) -> Decisions:
        """Take those of one step with one draw."""
        ((token_ids, score_gaps),) = self._draws
        router_gaps = torch.stack(self._router_gaps).amin(dim=0)
        self._draws.clear()
        self._router_gaps.clear()
        return Decisions(token_ids.cpu(), score_gaps.cpu(), router_gaps.cpu())

    def forget(self) -> None:
        """Drop what was decided in a step that draws nothing of interest."""
        self._draws.clear()
        self._router_gaps.clear()

    def _sample(
        self,
        logits: Tensor,
        inputs: SamplingInputs,
        rows: SamplingRows,
        vocabulary_map: VocabularyMap | None = None,
        num_logprobs: int | None = None,
    ) -> SampleOutput:
        drawn = self._inner.sample_tokens(logits, inputs, rows, vocabulary_map, num_logprobs)
        self._draws.append((drawn.token_ids, _score_gaps(logits, inputs, rows)))
        return drawn

    def _route(
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
        if topk_groups < num_groups:
            raise ValueError(f"num_groups {num_groups}, topk_groups {topk_groups}: gaps of groups are not measured")
        scores = torch.sigmoid(router_logits.float()) + correction_bias
        best = scores.sort(dim=1, descending=True).values
        self._router_gaps.append(best[:, top_k - 1] - best[:, top_k])
        return self._inner.route_experts(
            router_logits,
            correction_bias,
            top_k=top_k,
            num_groups=num_groups,
            topk_groups=topk_groups,
            renormalize=renormalize,
            scaling_factor=scaling_factor,
            slot_mapping=slot_mapping,
        )


def _score_gaps(logits: Tensor, inputs: SamplingInputs, rows: SamplingRows) -> Tensor:
    """Temperature is the only processor here; the logarithm of the partition function cancels."""
    temperature = inputs.temperature[rows.sequence].double()
    is_greedy = temperature < GREEDY_TEMPERATURE
    scale = torch.where(is_greedy, 1.0, temperature)
    noise = gumbel_from_bits(noise_bits(inputs.seed[rows.sequence], rows.token_index, logits.shape[1])).double()
    scores = logits.double() / scale[:, None] + torch.where(is_greedy[:, None], 0.0, noise)
    best = scores.topk(2, dim=1).values
    return best[:, 0] - best[:, 1]
