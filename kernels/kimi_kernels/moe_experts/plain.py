"""The routed experts in torch: each expert's tokens together, its weights read once, a token's experts added in order.

What an expert's rows are multiplied by, and how, is as in `linear.plain`.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count

import torch
from torch import Tensor

from kimi_kernels.linear.plain import KINDS, multiply, pack_matrices
from kimi_kernels.moe_experts.op import ExpertOutputs, Terms, check_experts, check_second, check_weights
from kimi_kernels.quantization.plain import dequantize
from kimi_kernels.silu_mul.plain import activate
from kimi_kernels.weights import ExpertWeights, PackedExperts, expert_weight

TILE_ROWS = {"cpu": 16, "cuda": 128}
"""Rows of a tile by device. Fewer than in `row_tiles`, as every expert's rows fill tiles of their own."""
FEW_TOKENS = 4
"""The most tokens for which every expert runs over all of them: a product of 4 rows takes hardly longer than one of 1,
and nothing has to be gathered first."""


def pack_experts(weights: ExpertWeights) -> PackedExperts:
    """`PackExperts`: E matrices of gate_up, then E of down, all of one kind.

    One expert is dequantised at a time: what that allocates on the way is several times the float32 matrix.
    """
    check_weights(weights)
    num_experts, hidden_size, intermediate_size = weights.down.shape
    kind, tensors = pack_matrices(
        [
            dequantize(expert_weight(stacked, expert)).float()
            for stacked in (weights.gate_up, weights.down)
            for expert in range(num_experts)
        ]
    )
    return PackedExperts(
        kind=kind,
        tensors=tensors,
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
    )


def moe_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: PackedExperts, first_expert: int = 0
) -> Tensor:
    """`MoeExperts`."""
    check_experts(x, topk_ids, topk_weights, experts, KINDS)
    is_float32 = x.dtype == torch.float32
    local_ids = topk_ids - first_expert if first_expert else topk_ids
    outputs = _outputs(x if is_float32 else x.float(), local_ids.tolist(), experts)
    if outputs is None:
        return torch.zeros_like(x)
    first, *others = outputs.view(*topk_ids.shape, -1).mul_(topk_weights.unsqueeze(-1)).unbind(1)
    for other in others:
        first = first + other
    return first.contiguous() if is_float32 else first.to(x.dtype)


def _outputs(x: Tensor, local_ids: list[list[int]], experts: PackedExperts) -> Tensor | None:
    """down(silu(gate(x)) * up(x)) of every token-expert pair, [T * K, H]; zeros of experts held elsewhere, None if all
    are."""
    num_experts, num_tokens, kind = experts.num_experts, len(x), experts.kind
    row_of_token = _place_rows(local_ids, num_experts)
    if not row_of_token:
        return None
    sizes = [len(rows) for rows in row_of_token.values()]
    nowhere = sum(sizes)
    # One token's experts stand in the order of its assignments.
    is_in_order = num_tokens == 1 and nowhere == len(local_ids[0])
    places = (
        []
        if is_in_order
        else [
            row_of_token[expert][token] if expert in row_of_token else nowhere
            for token, ids in enumerate(local_ids)
            for expert in ids
        ]
    )
    inputs: Sequence[Tensor] = [x] * len(sizes)
    if num_tokens > FEW_TOKENS:
        tokens = torch.tensor([token for rows in row_of_token.values() for token in rows], device=x.device)
        inputs = x.index_select(0, tokens).split_with_sizes(sizes)
    gate_up, down = experts.tensors[:num_experts], experts.tensors[num_experts:]
    hidden = _multiply(inputs, row_of_token, kind, gate_up, 2 * experts.intermediate_size)
    activated = activate(torch.cat(hidden)).split_with_sizes(sizes)
    outputs = _multiply(activated, row_of_token, kind, down, experts.hidden_size)
    if is_in_order:
        return torch.cat(outputs)
    if nowhere in places:
        outputs.append(x.new_zeros(1, experts.hidden_size))
    return torch.cat(outputs).index_select(0, torch.tensor(places, device=x.device))


def _place_rows(local_ids: list[list[int]], num_experts: int) -> Mapping[int, Mapping[int, int] | range]:
    """Give each expert held here a row for each token it runs over: experts in the order in which tokens take them."""
    num_tokens = len(local_ids)
    if num_tokens <= FEW_TOKENS:
        held = dict.fromkeys([expert for ids in local_ids for expert in ids if 0 <= expert < num_experts])
        return {expert: range(place * num_tokens, (place + 1) * num_tokens) for place, expert in enumerate(held)}
    tokens_of_expert: dict[int, dict[int, None]] = {}
    for token, ids in enumerate(local_ids):
        for expert in ids:
            if 0 <= expert < num_experts:
                tokens_of_expert.setdefault(expert, {})[token] = None
    row = count()
    return {expert: dict(zip(tokens, row, strict=False)) for expert, tokens in tokens_of_expert.items()}


def _multiply(
    inputs: Sequence[Tensor], chosen: Iterable[int], kind: str, matrices: tuple[Tensor, ...], out_features: int
) -> list[Tensor]:
    return [
        multiply(rows, kind, matrices[expert], out_features, TILE_ROWS)
        for rows, expert in zip(inputs, chosen, strict=True)
    ]


def sum_terms(terms: Terms, second: Tensor | None = None) -> Tensor:
    """`SumTerms`: outputs are added in float32 in the order of a token's experts, each sum is rounded to the dtype."""
    if second is not None:
        check_second(terms, second)
    if isinstance(terms, ExpertOutputs):
        local = terms.topk_ids - terms.first_expert
        is_held = ((local >= 0) & (local < terms.num_experts)).unsqueeze(2)
        outputs = terms.outputs.view(*terms.topk_ids.shape, -1).float()
        total = torch.zeros(terms.shape, dtype=torch.float32, device=outputs.device)
        for place in range(outputs.shape[1]):
            weighted = terms.topk_weights[:, place, None] * outputs[:, place]
            total += torch.where(is_held[:, place], weighted, 0.0)
        terms = total.to(terms.dtype)
    return terms if second is None else terms + second
