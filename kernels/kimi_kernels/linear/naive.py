"""The linear layers as their formulas say, in float64."""

import torch
from torch import Tensor

from kimi_kernels.quantization.naive import dequantize
from kimi_kernels.weights import Weight


def linear(x: Tensor, weight: Weight) -> Tensor:
    return torch.einsum("ti,oi->to", x.double(), dequantize(weight))


def per_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("tni,nio->tno", x.double(), weight.double())
