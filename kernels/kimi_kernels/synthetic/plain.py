"""The synthetic ops in torch: the hash they draw from, uniform routing, and forced acceptance."""

import torch
from torch import Tensor

from kimi_kernels.moe_route.plain import without_padding
from kimi_kernels.sampling_inputs import SamplingInputs, SamplingRows

RENORMALIZE_EPS = 1e-20
_WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B1
"""2^32 over the golden ratio: spreads consecutive numbers over all words."""
MIX_1, MIX_2 = 0x85EBCA6B, 0xC2B2AE35
"""Multipliers of MurmurHash3's finalizer (Austin Appleby, public domain)."""
UNIT = 2.0**-24
"""A word's upper 24 bits times this lie in [0, 1) and are exact in float32."""


def mix(words: Tensor) -> Tensor:
    """int64 holding 32-bit words -> int64 holding 32-bit words, every bit of which depends on every bit."""
    words = words & _WORD
    words = words ^ (words >> 16)
    words = (words * MIX_1) & _WORD
    words = words ^ (words >> 13)
    words = (words * MIX_2) & _WORD
    return words ^ (words >> 16)


def unit_interval(words: Tensor) -> Tensor:
    """int64 holding 32-bit words -> float32 in [0, 1)."""
    return (words >> 8).float() * UNIT


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
    """`RouteExperts` with scores hashed from the bits of the logits: each token's experts are uniform and
    distinct, repeat when the step repeats, and differ between rows, layers and steps as the logits do.

    Bias and groups are ignored.
    """
    expert = torch.arange(router_logits.shape[1], device=router_logits.device)
    bits = router_logits.float().contiguous().view(torch.int32).long()
    # Two rounds: one would leave logits that differ in an expert's own term with the same score.
    scores = unit_interval(mix(mix(bits) + expert * GOLDEN))
    topk_ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, topk_ids)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + RENORMALIZE_EPS)
    return without_padding(topk_ids.to(torch.int32), slot_mapping), weights * scaling_factor


def force_acceptance(token_ids: Tensor, inputs: SamplingInputs, rows: SamplingRows, chances: Tensor) -> Tensor:
    """Drawn tokens, changed so that each draft token is accepted by chance: a row that the draw accepts takes its draft
    token, one that it rejects takes another.

    A row's chance is drawn from its sequence's seed and its token index. A round reads no index that an earlier round
    has read, so rounds are independent, and the same request repeats.

    Args:
        token_ids: [R] int64, as drawn; placeholders of failed rows stay.
        rows: of a verify: a sequence has a row behind each of its draft tokens, and placeholders behind its window.
        chances: [W_max + 1, W_max] float32, of a sequence with so many draft tokens, for each of them.
    Returns:
        [R] int64.
    """
    window = rows.window_token_ids
    if not window.shape[1]:
        return token_ids
    place = rows.window_len.long()
    draft = window[rows.sequence, place.clamp(max=window.shape[1] - 1)].long()
    is_draft = (place < window.shape[1]) & (draft >= 0) & (token_ids >= 0)
    num_drafts = (window >= 0).sum(dim=1)[rows.sequence]
    seed = inputs.seed[rows.sequence]
    drawn = unit_interval(mix(mix(mix(seed) + (seed >> 32)) + rows.token_index * GOLDEN))
    chance = chances[num_drafts, place.clamp(max=chances.shape[1] - 1)]
    other = torch.where(token_ids == draft, torch.where(draft > 0, draft - 1, draft + 1), token_ids)
    return torch.where(is_draft, torch.where(drawn < chance, draft, other), token_ids)
