"""`pack_experts` and `moe_experts` in Triton-language."""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_dtype, require_shape
from kimi_kernels.choice_products import Terms
from kimi_kernels.moe_experts.kernel_layer import (
    PACKED_KINDS,
    Layer,
    choice_products,
    down_few,
    down_sorted,
    gate_up_few,
    gate_up_sorted,
    sort_choices,
)
from kimi_kernels.moe_experts.launch import FEW_CHOICES, few_launch, is_few, sorted_launch
from kimi_kernels.quantization.tiles import cut_tiles, gate_up_rows, identity_rows
from kimi_kernels.weights import ExpertWeights, Int4Weight, Mxfp4Weight, PackedExperts, Weight

MAX_EXPERTS = 1 << 15


def pack_experts(weights: ExpertWeights) -> PackedExperts:
    """Cut every expert into tiles, gate and up rows in stripes (`signatures.PackExperts`).

    Raises:
        ValueError: the shapes of gate_up and down do not fit, their formats differ, or `cut_tiles` refuses one.
    """
    num_experts, rows, hidden_size = _shape(weights.gate_up)
    intermediate_size = rows // 2
    require(
        _shape(weights.down) == (num_experts, hidden_size, intermediate_size) and rows % 2 == 0,
        "down",
        f"shape {list(_shape(weights.down))}",
        f"[{num_experts}, {hidden_size}, {rows} / 2]",
    )
    require(num_experts < MAX_EXPERTS, "gate_up", f"{num_experts} experts", f"fewer than {MAX_EXPERTS}")
    device = _device(weights.gate_up)
    gate_up = cut_tiles(weights.gate_up, gate_up_rows(intermediate_size, device))
    down = cut_tiles(weights.down, identity_rows(hidden_size, device))
    require(gate_up.kind == down.kind, "down", f"{down.kind} weights", f"{gate_up.kind}, as gate_up")
    arrivals = torch.zeros(FEW_CHOICES * gate_up.tiles.shape[1], dtype=torch.int32, device=device)
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
    """`signatures.MoeExperts`. One stream at a time may run a layer's experts: they hold the scratch of its splits.

    Raises:
        ValueError: a shape or dtype is wrong, or the experts were packed by another kernel set.
    """
    check_experts(x, topk_ids, topk_weights, experts)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    layer = Layer(x, topk_ids, topk_weights, experts, first_expert)
    if is_few(layer.num_choices, layer.down_steps):
        few = few_launch(layer.num_choices, layer.gate_up_row_tiles, layer.gate_up_steps, layer.down_row_tiles)
        return choice_products(layer, down_few(layer, few, gate_up_few(layer, few)))
    many = sorted_launch(layer.num_choices, experts.num_experts, layer.down_steps, layer.tall_shapes())
    order = sort_choices(layer, many.columns)
    hidden = gate_up_sorted(layer, many, order)
    return choice_products(layer, down_sorted(layer, many, order, hidden))


def check_experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: PackedExperts) -> None:
    """
    Raises:
        ValueError: a shape or dtype is wrong, or the experts were packed by another kernel set.
    """
    kind = PACKED_KINDS.get(experts.kind)
    require(kind is not None, "experts", f"experts packed as {experts.kind!r}", f"one of {sorted(PACKED_KINDS)}")
    require_shape("x", x, None, experts.hidden_size)
    require_dtype("x", x, torch.bfloat16, torch.float16, torch.float32)
    require_shape("topk_ids", topk_ids, x.shape[0], None)
    require_dtype("topk_ids", topk_ids, torch.int32)
    require_shape("topk_weights", topk_weights, *topk_ids.shape)
    require_dtype("topk_weights", topk_weights, torch.float32)
    require(topk_ids.shape[1] > 0, "topk_ids", "0 choices a token", "at least 1")


def _shape(weight: Weight) -> tuple[int, int, int]:
    """[E, out_features, in_features] of a weight of any format."""
    columns_a_word = 1
    if isinstance(weight, Tensor):
        tensor = weight
    elif isinstance(weight, Int4Weight):
        tensor, columns_a_word = weight.packed, 8
    elif isinstance(weight, Mxfp4Weight):
        tensor, columns_a_word = weight.codes, 2
    else:
        tensor = weight.values
    require(tensor.ndim == 3, "weights", f"{tensor.ndim} dimensions", "[E, out_features, in_features]")
    return tensor.shape[0], tensor.shape[1], tensor.shape[2] * columns_a_word


def _device(weight: Weight) -> torch.device:
    return (weight if isinstance(weight, Tensor) else weight.scales).device
