"""The norms in Triton-language: one program a row (or a chunk of one), read once, float32 inside."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.moe_experts.kernel_sum import assignment_arguments, sum_of_assignments
from kimi_kernels.moe_experts.op import Terms
from kimi_kernels.rms_norm.op import check_add, check_chunks, check_concat, check_norm


@triton.jit
def normalize(x, weight, width, eps):
    """x: [BLOCK] float32, 0 past `width`. weight: [BLOCK] float32."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight


@triton.jit
def rms_norm_kernel(
    x,  # [T, chunks * width], chunk c of row t at t * x_stride + c * width
    weights,  # [chunks, width]
    out,  # [T, ...], chunk c of row t at t * out_stride + c * width
    x_stride,
    out_stride,
    width,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    inside = column < width
    chunk = tl.program_id(1) * width
    weight = tl.load(weights + chunk + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(x + row * x_stride + chunk + column, mask=inside, other=0.0).to(tl.float32)
    normed = normalize(values, weight, width, eps)
    tl.store(out + row * out_stride + chunk + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x,  # [T, width]; products of assignments where TOP_K is not 0
    topk_ids,  # as the next ones: of `sum_of_assignments`
    topk_weights,
    first_expert,
    num_experts,
    second,  # [T, width], contiguous, or unused
    residual,  # [T, width]
    weight,  # [width]
    out,  # [T, width]
    total,  # [T, width]
    x_stride,
    residual_stride,
    width,
    eps,
    TOP_K: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    inside = column < width
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if TOP_K:
        summed = sum_of_assignments(
            x, topk_ids, topk_weights, row, column, inside, width, first_expert, num_experts, TOP_K
        )
        added = summed.to(x.dtype.element_ty).to(tl.float32)
    else:
        added = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_SECOND:
        added += tl.load(second + row * width + column, mask=inside, other=0.0).to(tl.float32)
        added = added.to(x.dtype.element_ty).to(tl.float32)
    values = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32) + added
    rounded = values.to(total.dtype.element_ty)
    tl.store(total + row * width + column, rounded, mask=inside)
    normed = normalize(rounded.to(tl.float32), scale, width, eps)
    tl.store(out + row * width + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def concat_rms_norm_kernel(
    a,  # [T, a_width]
    a_weight,  # [a_width]
    b,  # [T, b_width]
    b_weight,  # [b_width]
    out,  # [T, a_width + b_width]
    a_stride,
    b_stride,
    a_width,
    b_width,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    target = out + row * (a_width + b_width) + column
    if tl.program_id(1) == 0:
        inside = column < a_width
        weight = tl.load(a_weight + column, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(a + row * a_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, normalize(values, weight, a_width, eps).to(out.dtype.element_ty), mask=inside)
    else:
        inside = column < b_width
        weight = tl.load(b_weight + column, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(b + row * b_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + a_width, normalize(values, weight, b_width, eps).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`RmsNorm`."""
    check_norm(x, weight)
    return _norm_chunks(x, weight.unsqueeze(0), eps)


def chunked_rms_norm(x: Tensor, weights: Tensor, eps: float) -> Tensor:
    """`ChunkedRmsNorm`."""
    check_chunks(x, weights)
    return _norm_chunks(x, weights, eps)


def add_rms_norm(
    x: Terms, residual: Tensor, weight: Tensor, eps: float, second: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`AddRmsNorm`."""
    check_add(x, residual, weight, second)
    terms, topk_ids, topk_weights, first_expert, num_experts, top_k = assignment_arguments(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=terms.device)
    total = torch.empty(x.shape, dtype=residual.dtype, device=terms.device)
    if x.shape[0]:
        add_rms_norm_kernel[(x.shape[0],)](
            terms, topk_ids, topk_weights, first_expert, num_experts, terms if second is None else second.contiguous(),
            residual, weight.contiguous(), out, total, terms.stride(0), residual.stride(0), x.shape[1], eps,
            TOP_K=top_k, HAS_SECOND=second is not None, **_options(x.shape[1], terms.device),
        )  # fmt: skip
    return out, total


def concat_rms_norm(a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor, eps: float) -> Tensor:
    """`ConcatRmsNorm`."""
    check_concat(a, a_weight, b, b_weight)
    a_width, b_width = a.shape[1], b.shape[1]
    out = torch.empty(a.shape[0], a_width + b_width, dtype=a.dtype, device=a.device)
    if a.shape[0]:
        concat_rms_norm_kernel[(a.shape[0], 2)](
            a, a_weight.contiguous(), b, b_weight.contiguous(), out, a.stride(0), b.stride(0), a_width, b_width, eps,
            **_options(max(a_width, b_width), a.device),
        )  # fmt: skip
    return out


def _norm_chunks(x: Tensor, weights: Tensor, eps: float) -> Tensor:
    num_chunks, width = weights.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        rms_norm_kernel[(x.shape[0], num_chunks)](
            x, weights.contiguous(), out, x.stride(0), out.stride(0), width, eps, **_options(width, x.device)
        )
    return out


def _options(width: int, device: torch.device) -> dict[str, int | bool]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512)), **pdl_options(device)}
