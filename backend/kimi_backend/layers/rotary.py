"""Cosines and sines for rotary position embedding, with the stretched frequencies of `RopeType`.

RoPE: Su et al. 2021, arXiv 2104.09864. YaRN: Peng et al. 2023, arXiv 2309.00071, section 3.2.
"""

import math

import torch

from kimi_backend.config.rope_config import RopeConfig, RopeType


def inverse_frequencies(dim: int, rope: RopeConfig) -> torch.Tensor:
    """[dim / 2] float64, radians a position."""
    plain = rope.theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if rope.type is RopeType.DEFAULT:
        return plain
    slowed = torch.ones_like(plain)
    if rope.type is RopeType.LLAMA3:
        turns = plain * rope.original_max_position_embeddings / (2 * math.pi)
        slowed = ((rope.high_freq_factor - turns) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    elif rope.type is RopeType.YARN:
        slowed = _slowed_by_yarn(dim, rope)
    return plain / rope.factor * slowed + plain * (1 - slowed)


def _slowed_by_yarn(dim: int, rope: RopeConfig) -> torch.Tensor:
    """[dim / 2]: 0 for pairs that turn more than `beta_fast` times over the original length, 1 for those that turn
    less than `beta_slow` times, linear in the pair's number between."""

    def pair_with_turns(turns: float) -> float:
        period = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(period) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_with_turns(rope.beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(rope.beta_slow)), dim - 1)
    width = high - low or 0.001  # a step, where both ends fall on one pair
    return ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)


def cos_sin_table(dim: int, max_positions: int, rope: RopeConfig, device: torch.device) -> torch.Tensor:
    """[max_positions, dim] float32: cosines of the dim / 2 frequencies, then their sines, times `cos_sin_scale`.

    Angles are computed in float64: at position 262,143 a float32 angle is wrong by up to 0.015 radians.
    """
    positions = torch.arange(max_positions, dtype=torch.float64)
    angles = torch.outer(positions, inverse_frequencies(dim, rope))
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * rope.cos_sin_scale).float().to(device)
