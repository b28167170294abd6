"""The weight formats as their words say (`weights`), in float64: each column looks its code and its scale up."""

import torch
from torch import Tensor

from kimi_kernels.weights import MXFP4_GROUP_SIZE, Fp8Weight, Int4Weight, Weight


def dequantize(weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.double()
    if isinstance(weight, Fp8Weight):
        row, column = (torch.arange(size, device=weight.scales.device) for size in weight.values.shape[-2:])
        scales = weight.scales[..., row[:, None] // weight.block_size, column // weight.block_size]
        return weight.values.double() * scales.double()
    if isinstance(weight, Int4Weight):
        column = torch.arange(8 * weight.packed.shape[-1], device=weight.packed.device)
        codes = weight.packed[..., column // 8].long() >> 4 * (column % 8) & 15
        return (codes - 8).double() * weight.scales[..., column // weight.group_size].double()
    column = torch.arange(2 * weight.codes.shape[-1], device=weight.codes.device)
    codes = weight.codes[..., column // 2].long() >> 4 * (column % 2) & 15
    scales = weight.scales.double().masked_fill(weight.scales == 255, torch.nan)
    return e2m1(codes) * torch.exp2(scales - 127)[..., column // MXFP4_GROUP_SIZE]


def e2m1(codes: Tensor) -> Tensor:
    """Sign, two bits of exponent (bias 1, 0 is subnormal), one of mantissa."""
    exponents, mantissas = codes >> 1 & 3, codes & 1
    magnitudes = torch.where(exponents == 0, mantissas * 0.5, (1 + mantissas / 2) * torch.exp2(exponents - 1.0))
    return torch.where(codes >= 8, -magnitudes, magnitudes).double()
