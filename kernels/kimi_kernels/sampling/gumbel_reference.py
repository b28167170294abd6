"""32 bits to standard Gumbel noise in exactly rounded float32 steps (docs/sampling.md, "Gumbel noise").

Every step is one +, - or * of float32, an integer operation, or a conversion that rounds once, so any device gives
the same bits. Products and sums are separate torch calls: nothing may fuse them.
"""

import torch
from torch import Tensor

from kimi_kernels.sampling.constants import (
    LN2_HIGH,
    LN2_LOW,
    LOG_COEFFICIENTS,
    SQRT_HALF_BITS,
    TWO_TO_MINUS_32,
)


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """-log(-log(u)) with u = (bits + 1/2) / 2^32; finite for all bits.

    Args:
        bits: int64, each in [0, 2^32).
    Returns:
        float32, same shape.
    """
    is_upper = bits >= 2**31
    distance = torch.where(is_upper, (2**32 - 1) - bits, bits)
    to_edge = (distance.to(torch.float32) + 0.5) * TWO_TO_MINUS_32  # u below one half, 1 - u above
    exponent, remainder = _split(torch.where(is_upper, 1.0 - to_edge, to_edge))
    # 1 - u is known better than u here: log1p(-(1 - u)) keeps its relative accuracy down to 2^-33.
    remainder = torch.where(is_upper & (exponent == 0), -to_edge, remainder)
    exponential = -_log(exponent, remainder)
    return -_log(*_split(exponential))


def _split(value: Tensor) -> tuple[Tensor, Tensor]:
    """value = 2^exponent * (1 + remainder), with 1 + remainder in [sqrt(1/2), sqrt(2)); both float32 and exact."""
    value_bits = value.view(torch.int32)
    exponent = (value_bits - SQRT_HALF_BITS) >> 23
    mantissa = (value_bits - (exponent << 23)).view(torch.float32)
    return exponent.to(torch.float32), mantissa - 1.0


def _log(exponent: Tensor, remainder: Tensor) -> Tensor:
    """exponent * ln 2 + log(1 + remainder)."""
    square = remainder * remainder
    polynomial = remainder * LOG_COEFFICIENTS[0]
    for coefficient in LOG_COEFFICIENTS[1:-1]:
        polynomial = (polynomial + coefficient) * remainder
    polynomial = polynomial + LOG_COEFFICIENTS[-1]
    tail = (square * remainder) * polynomial
    tail = tail + exponent * LN2_LOW
    tail = tail - square * 0.5
    return (remainder + tail) + exponent * LN2_HIGH
