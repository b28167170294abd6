"""Reference of the routed experts: each expert's tokens on tiles of fixed height, a token's experts added in order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_dtype, require_float, require_shape
from kimi_kernels.quantization.reference import dequantize
from kimi_kernels.row_tiles import ceil_to, split_tiles, tile_weight
from kimi_kernels.silu_mul.plain import activate
from kimi_kernels.weights import ExpertWeights, PackedExperts

PACKED_KIND = "reference.float32"
TILE_ROWS = {"cpu": 16, "cuda": 128}
"""Rows of a tile by device. Fewer than in `row_tiles`, as every expert's rows fill tiles of their own."""


def pack_experts(weights: ExpertWeights) -> PackedExperts:
    """Keep every expert's transposed matrices in float32 (`signatures.PackExperts`).

    The tensors are E of gate_up [H, 2 * I], then E of down [I, H], all dimensions zero-padded to multiples of 16.

    Raises:
        ValueError: the shapes of gate_up and down do not fit, or a quantised weight's scales do not.
    """
    gate_up, down = dequantize(weights.gate_up), dequantize(weights.down)
    require_shape("down", down, None, None, None)
    num_experts, hidden_size, intermediate_size = down.shape
    require_shape("gate_up", gate_up, num_experts, 2 * intermediate_size, hidden_size)
    halves = tile_weight(gate_up.reshape(num_experts, 2, intermediate_size, hidden_size))
    return PackedExperts(
        kind=PACKED_KIND,
        tensors=(*halves.flatten(1, 2).transpose(1, 2).unbind(), *tile_weight(down).transpose(1, 2).unbind()),
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
    )


def moe_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: PackedExperts, first_expert: int = 0
) -> Tensor:
    """`signatures.MoeExperts`.

    Raises:
        ValueError: a shape or dtype is wrong, or the experts were packed by another kernel set.
    """
    if experts.kind != PACKED_KIND:
        raise ValueError(f"experts: got experts packed as {experts.kind!r}, expected {PACKED_KIND!r}")
    require_shape("x", x, None, experts.hidden_size)
    require_float("x", x)
    num_tokens = x.shape[0]
    require_shape("topk_ids", topk_ids, num_tokens, None)
    require_dtype("topk_ids", topk_ids, torch.int32, torch.int64)
    require_shape("topk_weights", topk_weights, *topk_ids.shape)
    require_dtype("topk_weights", topk_weights, torch.float32)
    num_choices = topk_ids.shape[1]
    require(num_choices > 0, "topk_ids", "0 choices a token", "at least 1")

    height = TILE_ROWS[x.device.type]
    assignment = _assign_rows(topk_ids, experts.num_experts, first_expert, height)
    outputs = _run_experts(x, assignment, experts, height)
    row_of_choice = torch.tensor(assignment.row_of_choice, dtype=torch.int64, device=x.device)
    chosen = outputs.index_select(0, row_of_choice)[:, : experts.hidden_size]
    chosen = chosen.view(num_tokens, num_choices, experts.hidden_size) * topk_weights.unsqueeze(-1)
    if not assignment.holds_all:
        held = torch.tensor(assignment.held, dtype=torch.bool, device=x.device).view(num_tokens, num_choices, 1)
        chosen = chosen.masked_fill(~held, 0)
    first, *others = chosen.unbind(1)
    for other in others:
        first = first + other
    return first.to(x.dtype)


@dataclass(frozen=True, slots=True)
class _Assignment:
    """The place where each choice of expert is computed: a buffer in which every expert's rows fill whole tiles."""

    tile_experts: list[int]
    """The expert of each tile."""
    token_of_row: list[int]
    """The token whose x each row holds. Rows that pad a tile repeat a token; nothing reads what becomes of them."""
    row_of_choice: list[int]
    """The row of each choice, token by token; 0 where not held."""
    held: list[bool]
    """True for each choice whose expert is held here."""
    holds_all: bool


def _assign_rows(topk_ids: Tensor, num_experts: int, first_expert: int, height: int) -> _Assignment:
    rows_of_expert: dict[int, list[int]] = {}
    local_ids = [expert - first_expert for expert in topk_ids.flatten().tolist()]
    for choice, expert in enumerate(local_ids):
        rows_of_expert.setdefault(expert, []).append(choice)
    num_choices = topk_ids.shape[1]
    tile_experts: list[int] = []
    token_of_row: list[int] = []
    row_of_choice = [0] * len(local_ids)
    for expert, choices in rows_of_expert.items():
        if not 0 <= expert < num_experts:
            continue
        for row, choice in enumerate(choices, start=len(token_of_row)):
            row_of_choice[choice] = row
        num_rows = ceil_to(height, len(choices))
        token_of_row += [choice // num_choices for choice in choices]
        token_of_row += [0] * (num_rows - len(choices))
        tile_experts += [expert] * (num_rows // height)
    held = [0 <= expert < num_experts for expert in local_ids]
    return _Assignment(tile_experts, token_of_row, row_of_choice, held, all(held))


def _run_experts(x: Tensor, assignment: _Assignment, experts: PackedExperts, height: int) -> Tensor:
    """down(silu(gate(x)) * up(x)) of every row of the assignment, at least one row: [rows, H padded to 16]."""
    gate_up = experts.tensors[: experts.num_experts]
    down = experts.tensors[experts.num_experts :]
    hidden_padded, num_rows = down[0].shape[1], len(assignment.token_of_row)
    if num_rows == 0:
        return torch.zeros(1, hidden_padded, dtype=torch.float32, device=x.device)
    token_of_row = torch.tensor(assignment.token_of_row, dtype=torch.int64, device=x.device)
    inputs = torch.zeros(num_rows, hidden_padded, dtype=torch.float32, device=x.device)
    inputs[:, : experts.hidden_size] = x.index_select(0, token_of_row)
    hidden = torch.empty(num_rows, gate_up[0].shape[1], dtype=torch.float32, device=x.device)
    outputs = torch.empty(num_rows, hidden_padded, dtype=torch.float32, device=x.device)
    _multiply(inputs, gate_up, assignment.tile_experts, hidden, height)
    _multiply(activate(hidden), down, assignment.tile_experts, outputs, height)
    return outputs


def _multiply(tiles: Tensor, weights_t: tuple[Tensor, ...], tile_experts: list[int], out: Tensor, height: int) -> None:
    for expert, tile, out_tile in zip(tile_experts, split_tiles(tiles, height), split_tiles(out, height), strict=True):
        torch.mm(tile, weights_t[expert], out=out_tile)
