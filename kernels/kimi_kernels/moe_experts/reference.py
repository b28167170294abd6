"""Reference of the routed experts: each expert's tokens on tiles of 16 rows, a token's experts summed in its order."""

from itertools import accumulate

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_dtype, require_float, require_shape
from kimi_kernels.quantization.reference import dequantize
from kimi_kernels.row_tiles import TILE_ROWS, ceil_to_tile, tile_weight
from kimi_kernels.silu_mul.reference import silu_mul
from kimi_kernels.weights import ExpertWeights, PackedExperts

PACKED_KIND = "reference.float32"


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

    tile_experts, rows = _assign_rows(topk_ids, experts.num_experts, first_expert)
    held = [row >= 0 for row in rows]
    row_of_choice = torch.tensor(rows, dtype=torch.int64, device=x.device)
    outputs = _run_experts(x, row_of_choice, held, num_choices, tile_experts, experts)
    if not all(held):
        topk_weights = topk_weights.masked_fill((row_of_choice < 0).view(topk_ids.shape), 0)
    # An expert held elsewhere reads row -1, a row of zeros.
    chosen = outputs[row_of_choice, : experts.hidden_size].view(num_tokens, num_choices, experts.hidden_size)
    chosen = chosen * topk_weights.unsqueeze(-1)
    total = chosen[:, 0]
    for choice in range(1, num_choices):
        total = total + chosen[:, choice]
    return total.to(x.dtype)


def _assign_rows(topk_ids: Tensor, num_experts: int, first_expert: int) -> tuple[list[int], list[int]]:
    """Give each choice a row in a buffer where every expert's rows fill whole tiles.

    Returns:
        The expert of each tile, and the row of each choice, token by token; -1 for experts held elsewhere.
    """
    local = [expert - first_expert for expert in topk_ids.flatten().tolist()]
    counts: dict[int, int] = {}
    places = []
    for expert in local:
        place = counts.get(expert, 0)
        places.append(place)
        counts[expert] = place + 1
    used = [expert for expert in counts if 0 <= expert < num_experts]
    sizes = [ceil_to_tile(counts[expert]) for expert in used]
    first_row = dict(zip(used, accumulate(sizes, initial=0), strict=False))
    tile_experts = [expert for expert, size in zip(used, sizes, strict=True) for _ in range(size // TILE_ROWS)]
    rows = [
        first_row[expert] + place if expert in first_row else -1 for expert, place in zip(local, places, strict=True)
    ]
    return tile_experts, rows


def _run_experts(
    x: Tensor,
    row_of_choice: Tensor,
    held: list[bool],
    num_choices: int,
    tile_experts: list[int],
    experts: PackedExperts,
) -> Tensor:
    """down(silu(gate(x)) * up(x)) of every tile of the buffer, and one more tile of zeros."""
    hidden_padded = ceil_to_tile(experts.hidden_size)
    num_rows = len(tile_experts) * TILE_ROWS
    tokens = torch.arange(len(held), device=x.device) // num_choices
    inputs = torch.zeros(num_rows, hidden_padded, dtype=torch.float32, device=x.device)
    if not all(held):
        kept = row_of_choice >= 0
        tokens, row_of_choice = tokens[kept], row_of_choice[kept]
    inputs[row_of_choice, : experts.hidden_size] = x.float()[tokens]
    gate_up = experts.tensors[: experts.num_experts]
    down = experts.tensors[experts.num_experts :]
    hidden = torch.empty(num_rows, 2 * ceil_to_tile(experts.intermediate_size), dtype=torch.float32, device=x.device)
    outputs = torch.zeros(num_rows + TILE_ROWS, hidden_padded, dtype=torch.float32, device=x.device)
    for expert, tile, out in zip(tile_experts, inputs.split(TILE_ROWS), hidden.split(TILE_ROWS), strict=False):
        torch.mm(tile, gate_up[expert], out=out)
    for expert, tile, out in zip(
        tile_experts, silu_mul(hidden).split(TILE_ROWS), outputs.split(TILE_ROWS), strict=False
    ):
        torch.mm(tile, down[expert], out=out)
    return outputs
