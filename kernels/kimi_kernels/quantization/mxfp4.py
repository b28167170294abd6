"""Formulas of MXFP4 (OCP Microscaling Formats, version 1.0): e2m1 codes with an e8m0 scale a group of 32 columns."""

import itertools

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_dtype, require_float, require_shape
from kimi_kernels.weights import MXFP4_GROUP_SIZE, Mxfp4Weight

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; 8 to 15 are their negatives."""
SCALE_BIAS = 127
SCALE_NAN = 255
_LARGEST_EXPONENT = 2
"""The exponent of 6, the largest e2m1 value: a group's largest magnitude gets it."""


def check_mxfp4(weight: Mxfp4Weight) -> None:
    """Raises ValueError: a dtype is not uint8, or the scales do not fit the codes."""
    require_dtype("codes", weight.codes, torch.uint8)
    require_dtype("scales", weight.scales, torch.uint8)
    in_features = weight.codes.shape[-1] * 2
    require(in_features % MXFP4_GROUP_SIZE == 0, "codes", f"{in_features} columns", f"a multiple of {MXFP4_GROUP_SIZE}")
    require_shape("scales", weight.scales, *weight.codes.shape[:-1], in_features // MXFP4_GROUP_SIZE)


def dequantize_mxfp4(weight: Mxfp4Weight) -> Tensor:
    """value of the code * 2 ** (scale - 127), exact in float32, and in bf16 too.

    Returns:
        [..., out_features, in_features] float32.
    Raises:
        ValueError: as `check_mxfp4`.
    """
    check_mxfp4(weight)
    values = torch.tensor([sign * value for sign in (1, -1) for value in E2M1_VALUES], device=weight.codes.device)
    codes = torch.stack([weight.codes & 15, weight.codes >> 4], dim=-1).flatten(-2)
    grouped = split_last(values[codes.int()], MXFP4_GROUP_SIZE)
    scales = torch.ldexp(torch.ones_like(weight.scales, dtype=torch.float32), weight.scales.int() - SCALE_BIAS)
    scales = torch.where(weight.scales == SCALE_NAN, torch.nan, scales)
    return (grouped * scales.unsqueeze(-1)).flatten(-2)


def quantize_mxfp4(weight: Tensor) -> Mxfp4Weight:
    """Codes nearest to the weights, ties to even; a group's scale is OCP's: its largest power of two divided by 4.

    Args:
        weight: [..., out_features, in_features], in_features a multiple of 32.
    """
    require_float("weight", weight)
    in_features = weight.shape[-1]
    require(
        in_features % MXFP4_GROUP_SIZE == 0, "weight", f"{in_features} columns", f"a multiple of {MXFP4_GROUP_SIZE}"
    )
    grouped = split_last(weight.float(), MXFP4_GROUP_SIZE)
    # frexp's mantissa is in [0.5, 1): its exponent is one more than that of the leading bit.
    exponents = torch.frexp(grouped.abs().amax(dim=-1)).exponent - 1 - _LARGEST_EXPONENT
    exponents = exponents.clamp(-SCALE_BIAS, SCALE_BIAS)
    scaled = torch.ldexp(grouped, -exponents.unsqueeze(-1))
    middles = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(E2M1_VALUES)])
    middles = middles.to(weight.device)
    below, above = (torch.bucketize(scaled.abs(), middles, right=right) for right in (False, True))
    codes = torch.where(below % 2 == 1, above, below) + 8 * torch.signbit(scaled)
    pairs = split_last(codes.to(torch.uint8).flatten(-2), 2)
    return Mxfp4Weight(codes=pairs[..., 0] | pairs[..., 1] << 4, scales=(exponents + SCALE_BIAS).to(torch.uint8))


def split_last(x: Tensor, size: int) -> Tensor:
    """[..., n] -> [..., n / size, size]."""
    return x.reshape(*x.shape[:-1], -1, size)
