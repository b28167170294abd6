"""Mixture of experts (DeepSeek-V3 report, arXiv 2412.19437, section 2.1.2): sigmoid router, shared expert.

| tensor | shape |
|---|---|
| gate.weight | [E, H] |
| gate.e_score_correction_bias | [E] float32 |
| experts.* | see `layers.expert_weights` |
| shared_experts.* | see `layers.mlp`; its width is n_shared_experts * moe_intermediate_size |
"""

from functools import partial
from typing import Any

import torch

from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.layers.expert_weights import load_experts
from kimi_backend.layers.mlp import DenseMlp
from kimi_backend.layers.residual import RankTerms
from kimi_backend.layers.side_stream import Work, side_stream
from kimi_backend.layers.weight_loader import Shard, WeightLoader
from kimi_kernels.weights import PackedWeight

ROWS_BESIDE = range(4, 9)
"""Numbers of rows whose shared expert fills the time in which the router and the sort of its choices read next to
nothing. Timed with 1, 4 and 16 rows: with 1 and with 16 it makes a step longer, as the two take memory from each other
(benchmarks/results/tried.md)."""


MOST_STACKED_WIDTH = 256
"""A shared expert that is so narrow on this rank begins in one product with the router, which alone would leave most of
the GPU idle. A wide one would delay the router for longer than a launch takes."""
MOST_STACKED_ROWS_TOGETHER = 8
"""The most rows for which what is left of it and the choice of experts share a launch. More rows of it take longer than
the choice does, and the experts would wait for both."""
MOST_STACKED_ROWS_BESIDE = 256
"""Beyond, it hides behind the router and the sort, up to so many rows."""


class MoeMlp:
    """Routed experts plus the shared expert. Each rank holds a slice of every expert's intermediate width, so that
    routing is the same on all ranks and one sum over ranks is of both."""

    def __init__(self, loader: WeightLoader, config: KimiModelConfig) -> None:
        g = config
        self._config = g
        self._kernels = loader.kernels
        self._side_stream = side_stream(loader.device)
        self._router: dict[str, Any] = {
            "top_k": g.num_experts_per_tok,
            "num_groups": g.n_group,
            "topk_groups": g.topk_group,
            "renormalize": g.norm_topk_prob,
            "scaling_factor": g.routed_scaling_factor,
        }
        self._load_router(loader)
        self._bias = loader.vector("gate.e_score_correction_bias", g.n_routed_experts, torch.float32)
        weights = load_experts(loader.scoped("experts"), g.n_routed_experts, g.hidden_size, g.moe_intermediate_size)
        self._experts = loader.kernels.pack_experts(weights)

    def _load_router(self, loader: WeightLoader) -> None:
        """The router's weight, and the shared expert's."""
        g = self._config
        width = g.n_shared_experts * g.moe_intermediate_size
        dtype = _gate_dtype(loader)
        self._shared: DenseMlp | None = None
        self._stacked_down: PackedWeight | None = None
        shape = (width, g.hidden_size)
        parts = [("gate", (g.n_routed_experts, g.hidden_size), Shard.NONE)]
        parts += [(f"shared_experts.{name}", shape, Shard.ROWS) for name in ("gate_proj", "up_proj")]
        is_narrow = 0 < width // loader.group.size <= MOST_STACKED_WIDTH and dtype == loader.dtype
        has_bias = loader.has("shared_experts.down_proj.bias") or loader.stacked_bias(parts) is not None
        if is_narrow and not has_bias:
            self._gate = loader.kernels.pack_linear(loader.stacked(parts))
            down = loader.matrix("shared_experts.down_proj", shape[::-1], Shard.COLUMNS)
            self._stacked_down = loader.kernels.pack_linear(down)
            return
        # As stored: rounding a router's weight can change which experts a token takes.
        self._gate = loader.kernels.pack_linear(loader.matrix("gate", (g.n_routed_experts, g.hidden_size), dtype=dtype))
        if width:
            self._shared = DenseMlp(loader.scoped("shared_experts"), g.hidden_size, width)

    def __call__(self, x: torch.Tensor, slot_mapping: torch.Tensor | None = None) -> RankTerms:
        """
        Args:
            x: [T, hidden_size], normed.
            slot_mapping: [T] int64; rows with -1 are padding and cost no expert's weights.
        Returns:
            This rank's terms of the routed and of the shared experts, [T, hidden_size] each.
        """
        if self._stacked_down is None:
            work = None if self._shared is None else partial(self._shared, x)
            shared = self._start(work, x.shape[0] in ROWS_BESIDE)
            router_logits = self._kernels.logits(x, self._gate)
        else:
            columns = self._kernels.logits(x, self._gate)
            router_logits, gate_up = columns.tensor_split([self._config.n_routed_experts], dim=1)
            beside = gate_up, self._stacked_down, x.dtype
            if x.shape[0] <= MOST_STACKED_ROWS_TOGETHER:
                topk_ids, topk_weights, down = self._kernels.route_silu_down(
                    router_logits, self._bias, *beside, slot_mapping=slot_mapping, **self._router
                )
                return RankTerms(self._kernels.moe_experts(x, topk_ids, topk_weights, self._experts), down)
            shared = self._start(partial(self._kernels.silu_down, *beside), x.shape[0] <= MOST_STACKED_ROWS_BESIDE)
        topk_ids, topk_weights = self._kernels.route_experts(
            router_logits, self._bias, slot_mapping=slot_mapping, **self._router
        )
        routed = self._kernels.moe_experts(x, topk_ids, topk_weights, self._experts)
        return RankTerms(routed, None if shared is None else shared())

    def _start(self, work: Work | None, is_beside: bool) -> Work | None:
        """The shared expert's output, under way where that gains anything."""
        return self._side_stream.start(work) if work is not None and is_beside else work


def _gate_dtype(loader: WeightLoader) -> torch.dtype:
    """The compute dtype if the file's values are exact in it, else float32."""
    stored = loader.source.dtype(f"{loader.prefix}gate.weight")
    return loader.dtype if stored == loader.dtype else torch.float32
