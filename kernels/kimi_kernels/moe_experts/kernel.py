"""`pack_experts` and `moe_experts` in Triton-language."""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require
from kimi_kernels.moe_experts.kernel_layer import (
    PACKED_KINDS,
    Layer,
    down_few,
    down_sorted,
    expert_outputs,
    gate_up_few,
    gate_up_sorted,
    sort_assignments,
)
from kimi_kernels.moe_experts.launch import FEW_ASSIGNMENTS, few_launch, is_few, sorted_launch
from kimi_kernels.moe_experts.op import Terms, check_experts, check_weights
from kimi_kernels.quantization.tiles import cut_tiles, gate_up_rows, identity_rows
from kimi_kernels.weights import ExpertWeights, PackedExperts, Weight

MAX_EXPERTS = 1 << 15


def pack_experts(weights: ExpertWeights) -> PackedExperts:
    """`PackExperts`: every expert is cut into tiles, gate and up rows in stripes. `cut_tiles` may refuse a weight."""
    check_weights(weights)
    num_experts, hidden_size, intermediate_size = weights.down.shape
    require(num_experts < MAX_EXPERTS, "gate_up", f"{num_experts} experts", f"fewer than {MAX_EXPERTS}")
    device = _device(weights.gate_up)
    gate_up = cut_tiles(weights.gate_up, gate_up_rows(intermediate_size, device))
    down = cut_tiles(weights.down, identity_rows(hidden_size, device))
    require(gate_up.kind == down.kind, "down", f"{down.kind} weights", f"{gate_up.kind}, as gate_up")
    arrivals = torch.zeros(FEW_ASSIGNMENTS * gate_up.tiles.shape[1], dtype=torch.int32, device=device)
    return PackedExperts(
        kind=f"triton.{gate_up.kind}",
        tensors=(gate_up.tiles, gate_up.scales, down.tiles, down.scales, arrivals),
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
    )


def moe_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: PackedExperts, first_expert: int = 0
) -> Terms:
    """`MoeExperts`. One stream at a time may run a layer's experts: they hold the scratch of its splits."""
    check_experts(x, topk_ids, topk_weights, experts, PACKED_KINDS)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    layer = Layer(x, topk_ids, topk_weights, experts, first_expert)
    if is_few(layer.num_assignments, layer.down_steps):
        few = few_launch(layer.num_assignments, layer.gate_up_row_tiles, layer.gate_up_steps, layer.down_row_tiles)
        return expert_outputs(layer, down_few(layer, few, gate_up_few(layer, few)))
    many = sorted_launch(layer.num_assignments, experts.num_experts, layer.down_steps, layer.hopper_shapes())
    order = sort_assignments(layer, many.columns)
    hidden = gate_up_sorted(layer, many, order)
    return expert_outputs(layer, down_sorted(layer, many, order, hidden))


def _device(weight: Weight) -> torch.device:
    return (weight if isinstance(weight, Tensor) else weight.scales).device
