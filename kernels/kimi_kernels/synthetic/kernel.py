"""The synthetic ops in Triton-language: one small launch each, so that they cost next to nothing."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_kernels.moe_route.kernel import Router, plain_router, route
from kimi_kernels.moe_route.kernel_shared import routed_beside
from kimi_kernels.sampling_inputs import SamplingInputs, SamplingRows
from kimi_kernels.synthetic import plain
from kimi_kernels.weights import PackedWeight

GOLDEN = tl.constexpr(plain.GOLDEN)
MIX_1 = tl.constexpr(plain.MIX_1)
MIX_2 = tl.constexpr(plain.MIX_2)
UNIT = tl.constexpr(plain.UNIT)
ROWS = 128


@triton.jit
def _mix(words):
    """words: uint32."""
    words = words ^ (words >> 16)
    words = words * MIX_1
    words = words ^ (words >> 13)
    words = words * MIX_2
    return words ^ (words >> 16)


@triton.jit
def _unit_interval(words):
    return (words >> 8).to(tl.float32) * UNIT


@triton.jit
def uniform_scores(logits, expert):
    """Scores in place of the router's: hashed from the bits of the logits."""
    words = _mix(_mix(logits.to(tl.uint32, bitcast=True)) + expert.to(tl.uint32) * GOLDEN)
    return _unit_interval(words)


@triton.jit
def force_acceptance_kernel(
    TOKEN_IDS,  # [R] int64
    SEED,  # [B] int64
    SEQUENCE,  # [R] int64
    TOKEN_INDEX,  # [R] int64
    WINDOW_LEN,  # [R] int32
    WINDOW,  # [B, width] int32
    CHANCES,  # [most draft tokens + 1, chances_stride] float32
    OUT,  # [R] int64
    num_rows,
    width,
    window_stride,
    chances_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """ROWS rows a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    drawn = tl.load(TOKEN_IDS + row, mask=is_row, other=-1)
    sequence = tl.load(SEQUENCE + row, mask=is_row, other=0)
    place = tl.load(WINDOW_LEN + row, mask=is_row, other=0)
    column = tl.arange(0, WIDTH)[None, :]
    inside = is_row[:, None] & (column < width)
    window = tl.load(WINDOW + sequence[:, None] * window_stride + column, mask=inside, other=-1)
    num_drafts = tl.sum((window >= 0).to(tl.int32), 1)
    draft = tl.max(tl.where(column == place[:, None], window, -1), 1).to(tl.int64)
    seed = tl.load(SEED + sequence, mask=is_row, other=0)
    index = tl.load(TOKEN_INDEX + row, mask=is_row, other=0)
    words = _mix(seed.to(tl.uint32)) + (seed >> 32).to(tl.uint32)
    words = _mix(_mix(words) + index.to(tl.uint32) * GOLDEN)
    column_of_chance = tl.minimum(place, chances_stride - 1)
    chance = tl.load(CHANCES + num_drafts * chances_stride + column_of_chance, mask=is_row, other=0.0)
    other = tl.where(drawn == draft, tl.where(draft > 0, draft - 1, draft + 1), drawn)
    token = tl.where(_unit_interval(words) < chance, draft, other)
    tl.store(OUT + row, tl.where((draft >= 0) & (drawn >= 0), token, drawn), mask=is_row)


def route_uniform(router_logits: Tensor, correction_bias: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """`plain.route_uniform`."""
    return route(_router(router_logits, **settings))


def route_uniform_silu_down(
    router_logits: Tensor,
    correction_bias: Tensor,
    gate_up: Tensor,
    weight: PackedWeight,
    dtype: torch.dtype,
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`RouteSiluDown` by `route_uniform`."""
    return routed_beside(_router(router_logits, **settings), gate_up, weight, dtype)


def _router(router_logits: Tensor, *, num_groups: int, topk_groups: int, **settings: Any) -> Router:
    return plain_router(router_logits, uniform_scores, **settings)


def force_acceptance(token_ids: Tensor, inputs: SamplingInputs, rows: SamplingRows, chances: Tensor) -> Tensor:
    """`plain.force_acceptance`."""
    window = rows.window_token_ids
    width = window.shape[1]
    if not width or not len(token_ids):
        return token_ids
    out = torch.empty_like(token_ids)
    force_acceptance_kernel[(triton.cdiv(len(token_ids), ROWS),)](
        token_ids, inputs.seed, rows.sequence, rows.token_index, rows.window_len, window, chances, out, len(token_ids),
        width, window.stride(0), chances.stride(0), ROWS=ROWS, WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip
    return out
