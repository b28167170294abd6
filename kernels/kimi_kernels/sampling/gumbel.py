"""32 bits to standard Gumbel noise in exactly rounded float32 steps (docs/sampling.md, "Gumbel noise").

Every step is one +, - or * of float32, an integer operation, or a conversion that rounds once, so any device gives
the same bits. Products and sums are separate torch calls: nothing may fuse them.
"""

from functools import cache

import torch
from torch import Tensor

from kimi_kernels.sampling.constants import (
    LN2_HIGH,
    LN2_LOW,
    LOG_COEFFICIENTS,
    SQRT_HALF_BITS,
    TWO_TO_MINUS_32,
)


@cache
def _number(value: float, device: torch.device) -> Tensor:
    """A constant as a tensor, kept: wrapping a Python number costs as much as the operation it is for."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """-log(-log(u)) with u = (bits + 1/2) / 2^32; finite for all bits.

    Args:
        bits: int64, each in [0, 2^32).
    Returns:
        float32, same shape.
    """
    one = _number(1.0, bits.device)
    as_signed = bits.to(torch.int32)  # keeps the low 32 bits: negative where u is above one half
    is_upper = as_signed < 0
    distance = torch.bitwise_xor(as_signed, as_signed >> 31)  # bits, or 2^32 - 1 - bits above one half
    to_edge = distance.to(torch.float32).add_(_number(0.5, bits.device)).mul_(_number(TWO_TO_MINUS_32, bits.device))
    exponent, remainder = _split(torch.where(is_upper, one - to_edge, to_edge))
    # 1 - u is known better than u here: log1p(-(1 - u)) keeps its relative accuracy down to 2^-33.
    remainder = torch.where(is_upper & (exponent == 0), -to_edge, remainder)
    exponential = _log(exponent, remainder).neg_()
    return _log(*_split(exponential)).neg_()


def _split(value: Tensor) -> tuple[Tensor, Tensor]:
    """value = 2^exponent * (1 + remainder), with 1 + remainder in [sqrt(1/2), sqrt(2)); both float32 and exact."""
    value_bits = value.view(torch.int32)
    exponent = (value_bits - SQRT_HALF_BITS) >> 23
    mantissa = (value_bits - (exponent << 23)).view(torch.float32)
    return exponent.to(torch.float32), mantissa.sub_(_number(1.0, value.device))


def _log(exponent: Tensor, remainder: Tensor) -> Tensor:
    """exponent * ln 2 + log(1 + remainder)."""
    device = remainder.device
    square = remainder * remainder
    polynomial = remainder * _number(LOG_COEFFICIENTS[0], device)
    for coefficient in LOG_COEFFICIENTS[1:-1]:
        polynomial.add_(_number(coefficient, device)).mul_(remainder)
    polynomial.add_(_number(LOG_COEFFICIENTS[-1], device))
    tail = (square * remainder).mul_(polynomial)
    tail.add_(exponent * _number(LN2_LOW, device))
    tail.sub_(square.mul_(_number(0.5, device)))
    return tail.add_(remainder).add_(exponent * _number(LN2_HIGH, device))
