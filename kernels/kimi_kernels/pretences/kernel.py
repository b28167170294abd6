"""The pretending ops in Triton-language: one small launch each, so that they cost next to nothing."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_kernels.argument_checks import require_dtype, require_shape
from kimi_kernels.pretences import reference
from kimi_kernels.sampling_inputs import SamplingInputs, SamplingRows

GOLDEN = tl.constexpr(reference.GOLDEN)
MIX_1 = tl.constexpr(reference.MIX_1)
MIX_2 = tl.constexpr(reference.MIX_2)
UNIT = tl.constexpr(reference.UNIT)
EPS = tl.constexpr(reference.RENORMALIZE_EPS)
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
def route_uniform_kernel(
    LOGITS,  # [T, num_experts] float32
    TOPK_IDS,  # [T, TOP_K] int32
    TOPK_WEIGHTS,  # [T, TOP_K] float32
    SLOTS,  # [T] int64, -1 for padding
    logits_stride,
    num_experts,
    scaling_factor,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    EXPERTS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    """One program a token."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    logits = tl.load(LOGITS + token * logits_stride + expert, mask=is_expert, other=0.0)
    words = _mix(_mix(logits.to(tl.uint32, bitcast=True)) + expert.to(tl.uint32) * GOLDEN)
    scores = tl.where(is_expert, _unit_interval(words), -1.0)
    rank = tl.arange(0, TOP_K_PADDED)
    ids = tl.zeros([TOP_K_PADDED], tl.int32)
    weights = tl.zeros([TOP_K_PADDED], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(scores, axis=0, tie_break_left=True)
        weights = tl.where(rank == k, tl.max(scores, axis=0), weights)
        ids = tl.where(rank == k, best, ids)
        scores = tl.where(expert == best, -1.0, scores)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights) + EPS)
    target = token * TOP_K + rank
    if HAS_SLOTS:
        ids = tl.where(tl.load(SLOTS + token) < 0, -1, ids)
    tl.store(TOPK_IDS + target, ids, mask=rank < TOP_K)
    tl.store(TOPK_WEIGHTS + target, weights * scaling_factor, mask=rank < TOP_K)


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


def route_uniform(
    router_logits: Tensor,
    correction_bias: Tensor,
    *,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scaling_factor: float,
    slot_mapping: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.route_uniform`.

    Raises:
        ValueError: the logits are not a matrix of float32.
    """
    require_shape("router_logits", router_logits, None, None)
    require_dtype("router_logits", router_logits, torch.float32)
    num_tokens, num_experts = router_logits.shape
    logits = router_logits if router_logits.stride(1) == 1 else router_logits.contiguous()
    topk_ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    topk_weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        route_uniform_kernel[(num_tokens,)](
            logits,
            topk_ids,
            topk_weights,
            topk_ids if slot_mapping is None else slot_mapping,
            logits.stride(0),
            num_experts,
            scaling_factor,
            TOP_K=top_k,
            TOP_K_PADDED=triton.next_power_of_2(top_k),
            EXPERTS=triton.next_power_of_2(num_experts),
            RENORMALIZE=renormalize,
            HAS_SLOTS=slot_mapping is not None,
            num_warps=1,
        )
    return topk_ids, topk_weights


def force_acceptance(token_ids: Tensor, inputs: SamplingInputs, rows: SamplingRows, chances: Tensor) -> Tensor:
    """`reference.force_acceptance`."""
    window = rows.window_token_ids
    width = window.shape[1]
    if not width or not len(token_ids):
        return token_ids
    out = torch.empty_like(token_ids)
    force_acceptance_kernel[(triton.cdiv(len(token_ids), ROWS),)](
        token_ids,
        inputs.seed,
        rows.sequence,
        rows.token_index,
        rows.window_len,
        window,
        chances,
        out,
        len(token_ids),
        width,
        window.stride(0),
        chances.stride(0),
        ROWS=ROWS,
        WIDTH=triton.next_power_of_2(width),
    )
    return out
