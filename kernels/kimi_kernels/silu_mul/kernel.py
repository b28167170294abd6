"""The gated activation in Triton-language, float32 inside."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.silu_mul.op import check_gate_up

MAX_BLOCK = 2048


@triton.jit
def silu_mul_kernel(
    gate_up,  # [T, 2 * width]
    out,  # [T, width]
    stride,
    width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`SiluMul`."""
    check_gate_up(gate_up)
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = min(MAX_BLOCK, triton.next_power_of_2(width))
        silu_mul_kernel[(num_tokens, triton.cdiv(width, block))](
            gate_up, out, gate_up.stride(0), width, BLOCK=block, num_warps=min(8, max(1, block // 256)),
            **pdl_options(gate_up.device),
        )  # fmt: skip
    return out
