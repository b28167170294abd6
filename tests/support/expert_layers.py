"""Random mixture-of-experts layers."""

import torch
from torch import Tensor

from kimi_kernels.quantization.mxfp4 import quantize_mxfp4
from kimi_kernels.quantization.plain import quantize_fp8, quantize_int4
from kimi_kernels.weights import ExpertWeights, Weight


def random_weight(kind: str, *shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Weight:
    """A weight of unit gain, int4, mxfp4, fp8 or plain."""
    plain = torch.randn(*shape, device=device) * shape[-1] ** -0.5
    if kind == "int4":
        return quantize_int4(plain)
    if kind == "mxfp4":
        return quantize_mxfp4(plain)
    if kind == "fp8":
        return quantize_fp8(plain)
    return plain.to(dtype)


def random_experts(
    kind: str, num_experts: int, hidden: int, intermediate: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> ExpertWeights:
    return ExpertWeights(
        gate_up=random_weight(kind, num_experts, 2 * intermediate, hidden, device=device, dtype=dtype),
        down=random_weight(kind, num_experts, hidden, intermediate, device=device, dtype=dtype),
    )


def random_assignments(num_tokens: int, num_experts: int, top_k: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Distinct experts a token, and their weights."""
    ids = torch.rand(num_tokens, num_experts, device=device).topk(top_k, dim=1).indices.to(torch.int32)
    return ids, torch.rand(num_tokens, top_k, device=device)
