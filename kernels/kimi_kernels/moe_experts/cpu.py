"""The routed experts for few rows on a CPU: the rows of each chosen expert together, each weight read once."""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_dtype, require_shape
from kimi_kernels.linear.plain import FLOAT_KIND, HALF_KIND, TILED_KIND, multiply, pack_matrices
from kimi_kernels.moe_experts import reference
from kimi_kernels.quantization.reference import dequantize
from kimi_kernels.silu_mul.plain import activate
from kimi_kernels.weights import ExpertWeights, PackedExperts


def pack_experts(weights: ExpertWeights) -> PackedExperts:
    """All experts in one kind of matrix (`signatures.PackExperts`): E of gate_up, E of down.

    Raises:
        ValueError: the shapes of gate_up and down do not fit, or a quantised weight's scales do not.
    """
    gate_up, down = dequantize(weights.gate_up).float(), dequantize(weights.down).float()
    require_shape("down", down, None, None, None)
    num_experts, hidden_size, intermediate_size = down.shape
    require_shape("gate_up", gate_up, num_experts, 2 * intermediate_size, hidden_size)
    kind, tensors = pack_matrices([*gate_up, *down])
    if kind == TILED_KIND:
        return reference.pack_experts(weights)
    return PackedExperts(
        kind=kind,
        tensors=tensors,
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
    )


FEW_TOKENS = 4
"""The most tokens for which every chosen expert runs over all of them: a product of 4 rows takes hardly longer than one
of 1, and nothing has to be gathered first."""


def moe_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: PackedExperts, first_expert: int = 0
) -> Tensor:
    """`signatures.MoeExperts`.

    Raises:
        ValueError: a shape or dtype is wrong, or the experts were packed by another kernel set.
    """
    if experts.kind not in (HALF_KIND, FLOAT_KIND):
        return reference.moe_experts(x, topk_ids, topk_weights, experts, first_expert)
    if x.dim() != 2 or x.shape[1] != experts.hidden_size or topk_ids.shape != topk_weights.shape:
        require_shape("x", x, None, experts.hidden_size)
        require_shape("topk_weights", topk_weights, *topk_ids.shape)
    require_shape("topk_ids", topk_ids, x.shape[0], None)
    require_dtype("topk_weights", topk_weights, torch.float32)
    require(topk_ids.shape[1] > 0, "topk_ids", "0 choices a token", "at least 1")
    if x.dtype != torch.float32:
        return moe_experts(x.float(), topk_ids, topk_weights, experts, first_expert).to(x.dtype)
    local_ids = topk_ids - first_expert if first_expert else topk_ids
    run = _run_all_tokens if len(x) <= FEW_TOKENS else _run_choices
    chosen = run(x, local_ids.tolist(), experts)
    if chosen is None:
        return torch.zeros_like(x)
    first, *others = chosen.view(*topk_ids.shape, -1).mul_(topk_weights.unsqueeze(-1)).unbind(1)
    for other in others:
        first = first + other
    return first.contiguous()


def _run_all_tokens(x: Tensor, topk_ids: list[list[int]], experts: PackedExperts) -> Tensor | None:
    """Do what `_run_choices` does: what this takes of each expert's rows has the same bits."""
    place_of_expert: dict[int, int] = {}
    for ids in topk_ids:
        for expert in ids:
            if 0 <= expert < experts.num_experts:
                place_of_expert.setdefault(expert, len(place_of_expert))
    if not place_of_expert:
        return None
    num_tokens, num_held, width = len(x), len(place_of_expert), experts.intermediate_size
    gate_up, down = experts.tensors[: experts.num_experts], experts.tensors[experts.num_experts :]
    hidden = torch.cat([multiply(x, experts.kind, gate_up[expert], 2 * width) for expert in place_of_expert])
    activated = activate(hidden).view(num_held, num_tokens, width).unbind()
    outputs = [
        multiply(rows, experts.kind, down[expert], experts.hidden_size)
        for rows, expert in zip(activated, place_of_expert, strict=True)
    ]
    if num_tokens == 1 and num_held == len(topk_ids[0]):
        return torch.cat(outputs)  # one token's experts stand in the order of its choice
    # The row after the last holds zeros.
    nowhere = num_held * num_tokens
    places = [
        place_of_expert[expert] * num_tokens + token if expert in place_of_expert else nowhere
        for token, ids in enumerate(topk_ids)
        for expert in ids
    ]
    if max(places) == nowhere:
        outputs.append(torch.zeros(1, experts.hidden_size))
    return torch.cat(outputs).index_select(0, torch.tensor(places))


def _run_choices(x: Tensor, topk_ids: list[list[int]], experts: PackedExperts) -> Tensor | None:
    """down(silu(gate(x)) * up(x)) of every choice, [T * K, H]; zeros for those held elsewhere, None if all are."""
    tokens_of_expert: dict[int, list[int]] = {}
    rows_of_choice = []
    for token, ids in enumerate(topk_ids):
        for expert in ids:
            tokens = tokens_of_expert.setdefault(expert, [])
            rows_of_choice.append((expert, len(tokens)))
            tokens.append(token)
    held = {expert: tokens for expert, tokens in tokens_of_expert.items() if 0 <= expert < experts.num_experts}
    if not held:
        return None
    sizes = [len(tokens) for tokens in held.values()]
    tokens_in_order = torch.tensor([token for tokens in held.values() for token in tokens])
    inputs = torch.split(x.index_select(0, tokens_in_order), sizes)
    hidden = _multiply(
        inputs, held, experts.tensors[: experts.num_experts], experts.kind, 2 * experts.intermediate_size
    )
    activated = torch.split(activate(torch.cat(hidden)), sizes)
    outputs = _multiply(activated, held, experts.tensors[experts.num_experts :], experts.kind, experts.hidden_size)
    starts, start = {}, 0
    for expert, size in zip(held, sizes, strict=True):
        starts[expert] = start
        start += size
    # The row after the last holds zeros.
    places = [starts[expert] + row if expert in starts else start for expert, row in rows_of_choice]
    rows = torch.cat((*outputs, torch.zeros(1, experts.hidden_size)))
    return rows.index_select(0, torch.tensor(places))


def _multiply(
    rows: tuple[Tensor, ...], held: dict[int, list[int]], matrices: tuple[Tensor, ...], kind: str, width: int
) -> list[Tensor]:
    return [multiply(part, kind, matrices[expert], width) for part, expert in zip(rows, held, strict=True)]
