"""Mixture of experts (DeepSeek-V3 report, arXiv 2412.19437, section 2.1.2): sigmoid router, shared expert.

| tensor | shape |
|---|---|
| gate.weight | [E, H] |
| gate.e_score_correction_bias | [E] float32 |
| experts.* | see `layers.expert_weights` |
| shared_experts.* | see `layers.mlp`; its width is n_shared_experts * moe_intermediate_size |
"""

from functools import partial

import torch

from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.layers.expert_weights import load_experts
from kimi_backend.layers.mlp import DenseMlp
from kimi_backend.layers.side_stream import Work, side_stream
from kimi_backend.layers.weight_loader import WeightLoader

MOST_ROWS_BESIDE = 8
"""Up to so many rows the shared expert fills the time in which the router and the sort of its choices read next to
nothing. More rows' experts begin so soon that the two only take memory from each other (docs/performance.md)."""


class MoeMlp:
    """Routed experts plus the shared expert. Each rank holds a slice of every expert's intermediate width, so that
    routing is the same on all ranks and one all-reduce sums both."""

    def __init__(self, loader: WeightLoader, config: KimiModelConfig) -> None:
        g = config
        self._config = g
        self._kernels = loader.kernels
        self._group = loader.group
        self._side_stream = side_stream(loader.device)
        # As stored: rounding a router's weight can change which experts a token takes.
        gate = loader.matrix("gate", (g.n_routed_experts, g.hidden_size), dtype=_gate_dtype(loader))
        self._gate = loader.kernels.pack_linear(gate)
        self._bias = loader.vector("gate.e_score_correction_bias", g.n_routed_experts, torch.float32)
        weights = load_experts(loader.scoped("experts"), g.n_routed_experts, g.hidden_size, g.moe_intermediate_size)
        self._experts = loader.kernels.pack_experts(weights)
        self._shared: DenseMlp | None = None
        if g.n_shared_experts:
            width = g.n_shared_experts * g.moe_intermediate_size
            self._shared = DenseMlp(loader.scoped("shared_experts"), g.hidden_size, width)

    def __call__(self, x: torch.Tensor, slot_mapping: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            x: [T, hidden_size], normed.
            slot_mapping: [T] int64; rows with -1 are padding and cost no expert's weights.
        Returns:
            [T, hidden_size] on every rank.
        """
        shared = self._start_shared(x)
        out = self._routed(x, slot_mapping)
        if shared is not None:
            out = out + shared()
        return self._group.all_reduce(out)

    def _start_shared(self, x: torch.Tensor) -> Work | None:
        """The shared expert's output, under way where that gains anything."""
        if self._shared is None:
            return None
        work = partial(self._shared.partial, x)
        return self._side_stream.start(work) if x.shape[0] <= MOST_ROWS_BESIDE else work

    def _routed(self, x: torch.Tensor, slot_mapping: torch.Tensor | None) -> torch.Tensor:
        g = self._config
        topk_ids, topk_weights = self._kernels.route_experts(
            self._kernels.logits(x, self._gate),
            self._bias,
            top_k=g.num_experts_per_tok,
            num_groups=g.n_group,
            topk_groups=g.topk_group,
            renormalize=g.norm_topk_prob,
            scaling_factor=g.routed_scaling_factor,
            slot_mapping=slot_mapping,
        )
        return self._kernels.moe_experts(x, topk_ids, topk_weights, self._experts)


def _gate_dtype(loader: WeightLoader) -> torch.dtype:
    """The compute dtype if the file's values are exact in it, else float32."""
    stored = loader.source.dtype(f"{loader.prefix}gate.weight")
    return loader.dtype if stored == loader.dtype else torch.float32
