# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""`route_silu_down` in Triton-language: the router and a narrow shared expert's second product in one launch.

Both read columns of one product and neither reads the other's result: some programs do the one, some the other.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.moe_route.kernel import Router, route, router
from kimi_kernels.moe_route.kernel_choose import choose_experts
from kimi_kernels.silu_mul.kernel_down import narrow_tiles, silu_down, silu_down_tile
from kimi_kernels.weights import PackedWeight


@triton.jit(do_not_specialize=["num_tokens"])
def route_silu_down_kernel(
    LOGITS,
    BIAS,
    TOPK_IDS,
    TOPK_WEIGHTS,
    SLOTS,
    gate_up,
    weight,
    out,
    logits_stride,
    group_size,
    num_groups,
    scaling_factor,
    num_tokens,
    stride,
    width,
    out_features,
    num_tiles,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SELECT_GROUPS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCORES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token, as of `route_kernel`, and behind them those of `silu_down_kernel`."""
    program = tl.program_id(0)
    if program < num_tokens:
        if PDL:
            gdc_wait()
        token = program.to(tl.int64)
        ids, weights = choose_experts(
            LOGITS, BIAS, token, logits_stride, group_size, num_groups, scaling_factor, TOP_K, TOP_K_PADDED,
            TOPK_GROUPS, GROUPS, SIZE, SELECT_GROUPS, RENORMALIZE, SCORES,
        )  # fmt: skip
        if SLOTS is not None:
            ids = tl.where(tl.load(SLOTS + token) < 0, -1, ids)
        rank = tl.arange(0, TOP_K_PADDED)
        tl.store(TOPK_IDS + token * TOP_K + rank, ids, mask=rank < TOP_K)
        tl.store(TOPK_WEIGHTS + token * TOP_K + rank, weights, mask=rank < TOP_K)
    else:
        part = program - num_tokens
        silu_down_tile(
            gate_up, weight, out, part % num_tiles, part // num_tiles, num_tokens, stride, width, out_features, ROWS,
            TILE, WIDTH, PDL,
        )  # fmt: skip


def route_silu_down(
    router_logits: Tensor,
    correction_bias: Tensor,
    gate_up: Tensor,
    weight: PackedWeight,
    dtype: torch.dtype,
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`RouteSiluDown`."""
    return routed_beside(router(router_logits, correction_bias, **settings), gate_up, weight, dtype)


def routed_beside(
    by: Router, gate_up: Tensor, weight: PackedWeight, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `route_silu_down` returns, by any router."""
    cut = narrow_tiles(gate_up, weight, dtype)
    if cut is None:
        return *route(by), silu_down(gate_up, weight, dtype)
    num_tokens = gate_up.shape[0]
    topk_ids, topk_weights = by.new_routing()
    out = torch.empty(num_tokens, weight.out_features, dtype=dtype, device=gate_up.device)
    route_silu_down_kernel[(num_tokens + cut.tiles * cut.row_blocks,)](
        by.logits, by.bias, topk_ids, topk_weights, by.slot_mapping, gate_up, weight.tensors[0], out, *by.sizes,
        num_tokens, gate_up.stride(0), weight.in_features, weight.out_features, cut.tiles, **by.constants,
        **cut.constants, num_warps=4, **pdl_options(out.device),
    )  # fmt: skip
    return topk_ids, topk_weights, out
