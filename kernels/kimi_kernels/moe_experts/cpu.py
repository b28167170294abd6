"""The routed experts for few rows on a CPU: one product a row and expert, each weight read once.

Awkward widths run on the reference.
"""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_dtype, require_shape
from kimi_kernels.moe_experts import reference
from kimi_kernels.quantization.reference import dequantize
from kimi_kernels.row_products import aligned, keeps_rows_aligned, multiply_rows
from kimi_kernels.silu_mul.cpu import silu_mul
from kimi_kernels.weights import ExpertWeights, PackedExperts

PACKED_KIND = "cpu.float32"
FEW_TOKENS = 48
"""Up to so many, experts are shared by too few tokens for sorting them to pay."""


def pack_experts(weights: ExpertWeights) -> PackedExperts:
    """Keep every expert's matrices input-major in float32 (`signatures.PackExperts`).

    The tensors are E of gate_up [1, H, 2 * I], then E of down [1, I, H].

    Raises:
        ValueError: the shapes of gate_up and down do not fit, or a quantised weight's scales do not.
    """
    gate_up, down = dequantize(weights.gate_up), dequantize(weights.down)
    require_shape("down", down, None, None, None)
    num_experts, hidden_size, intermediate_size = down.shape
    require_shape("gate_up", gate_up, num_experts, 2 * intermediate_size, hidden_size)
    if not keeps_rows_aligned(hidden_size, intermediate_size):
        return reference.pack_experts(weights)
    return PackedExperts(
        kind=PACKED_KIND,
        tensors=(*_input_major(gate_up), *_input_major(down)),
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
    )


def _input_major(matrices: Tensor) -> tuple[Tensor, ...]:
    """[E, out, in] -> E of [1, in, out] float32, contiguous."""
    return matrices.float().transpose(1, 2).contiguous().unsqueeze(1).unbind()


def moe_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: PackedExperts, first_expert: int = 0
) -> Tensor:
    """`signatures.MoeExperts`.

    Raises:
        ValueError: a shape or dtype is wrong, or the experts were packed by another kernel set.
    """
    if experts.kind != PACKED_KIND:
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
    if len(x) > FEW_TOKENS:
        return _by_expert(x, local_ids, topk_weights, experts)
    return _by_token(x, local_ids.tolist(), topk_weights, experts)


def _by_token(x: Tensor, topk_ids: list[list[int]], topk_weights: Tensor, experts: PackedExperts) -> Tensor:
    """Two products for every choice, on the weights where they lie: nothing is sorted or gathered.

    Args:
        topk_ids: [T, K] ids among the experts held here; others add nothing.
    """
    gate_up, down = experts.tensors[: experts.num_experts], experts.tensors[experts.num_experts :]
    choices = [(token, expert) for token, row in enumerate(topk_ids) for expert in row]
    held = [place for place, (_, expert) in enumerate(choices) if 0 <= expert < experts.num_experts]
    out = torch.zeros(len(x), 1, 1, experts.hidden_size)
    if not held:
        return out.view_as(x)
    weights = topk_weights.reshape(-1, 1)
    if len(held) < len(choices):
        choices, weights = [choices[place] for place in held], weights[torch.tensor(held)]
    rows, out_rows = aligned(x).view_as(out).unbind(), out.unbind()
    hidden = torch.cat([torch.bmm(rows[token], gate_up[expert]) for token, expert in choices])
    weighted = silu_mul(hidden.squeeze(1)).mul_(weights)
    for row, (token, expert) in zip(weighted.view(len(choices), 1, 1, -1).unbind(), choices, strict=True):
        out_rows[token].baddbmm_(row, down[expert])
    return out.view_as(x)


def _by_expert(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: PackedExperts) -> Tensor:
    """The same products and sums, all first choices before all second ones, an expert's tokens in one batch."""
    gate_up, down = experts.tensors[: experts.num_experts], experts.tensors[experts.num_experts :]
    out = torch.zeros(len(x), 1, experts.hidden_size)
    for ids, weights in zip(topk_ids.unbind(1), topk_weights.unbind(1), strict=True):
        sorted_ids, tokens = ids.sort()
        chosen, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
        for expert, group in zip(chosen.tolist(), torch.split(tokens, counts.tolist()), strict=True):
            if not 0 <= expert < experts.num_experts:
                continue
            hidden = silu_mul(multiply_rows(x.index_select(0, group), gate_up[expert]))
            hidden.mul_(weights.index_select(0, group).unsqueeze(1))
            sums = out.index_select(0, group)
            sums.baddbmm_(hidden.unsqueeze(1), down[expert].expand(len(group), -1, -1))
            out.index_copy_(0, group, sums)
    return out.squeeze(1)
