"""The routed experts as their formula says, in float64, an expert at a time."""

import torch
from torch import Tensor

from kimi_kernels.moe_experts.op import ExpertOutputs, Terms
from kimi_kernels.quantization.naive import dequantize
from kimi_kernels.weights import ExpertWeights


def moe_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: ExpertWeights, first_expert: int = 0
) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    for expert, (gate_up, down) in enumerate(zip(dequantize(weights.gate_up), dequantize(weights.down), strict=True)):
        token, place = (topk_ids == first_expert + expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ gate_up.T).chunk(2, dim=1)
        output = (gate * gate.sigmoid() * up) @ down.T
        out.index_add_(0, token, topk_weights[token, place, None].double() * output)
    return out


def sum_terms(terms: Terms, second: Tensor | None = None) -> Tensor:
    if isinstance(terms, ExpertOutputs):
        local = (terms.topk_ids - terms.first_expert)[..., None]
        weighted = terms.topk_weights[..., None].double() * terms.outputs.double().view(*terms.topk_ids.shape, -1)
        is_held = (local >= 0) & (local < terms.num_experts)
        terms = torch.where(is_held, weighted, 0.0).sum(dim=1).to(terms.dtype)
    return terms if second is None else (terms.double() + second.double()).to(second.dtype)
