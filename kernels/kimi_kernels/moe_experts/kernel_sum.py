# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The weighted sum of a token's experts in the order of its assignments: for who adds it, and as a kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.moe_experts.op import ExpertOutputs, Terms, check_second

BLOCK = 1024


@triton.jit
def sum_of_assignments(
    products,  # [T * TOP_K, width]
    topk_ids,  # [T, TOP_K]
    topk_weights,  # [T, TOP_K]
    token,
    column,
    inside,
    width,
    first_expert,
    num_experts,
    TOP_K: tl.constexpr,
):
    """Some columns of a token's sum, float32; experts held elsewhere add nothing."""
    total = tl.zeros(column.shape, tl.float32)
    for assignment in tl.static_range(TOP_K):
        index = token.to(tl.int64) * TOP_K + assignment
        local = tl.load(topk_ids + index) - first_expert
        weight = tl.load(topk_weights + index)
        # Read whatever is there: a load that waits for the id would come later.
        product = tl.load(products + index * width + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.where((local >= 0) & (local < num_experts), weight * product, 0.0)
    return total


@triton.jit
def sum_assignments_kernel(
    products,  # as the next ones: of `sum_of_assignments`
    topk_ids,
    topk_weights,
    second,  # [T, width], contiguous, or unused
    out,  # [T, width]
    first_expert,
    num_experts,
    width,
    TOP_K: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token and BLOCK columns."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dtype: tl.constexpr = out.dtype.element_ty
    total = sum_of_assignments(
        products, topk_ids, topk_weights, token, column, inside, width, first_expert, num_experts, TOP_K
    ).to(dtype)
    if HAS_SECOND:
        more = tl.load(second + token * width + column, mask=inside, other=0.0)
        total = (total.to(tl.float32) + more.to(tl.float32)).to(dtype)
    tl.store(out + token * width + column, total, mask=inside)


def assignment_arguments(terms: Terms) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
    """Make the arguments of a kernel that adds terms: their tensor, ids, weights, first expert, number of experts and
    TOP_K; 0 where the terms are one tensor, which then stands for ids and weights too."""
    if isinstance(terms, Tensor):
        return terms, terms, terms, 0, 0, 0
    top_k = terms.topk_ids.shape[1]
    return terms.outputs, terms.topk_ids, terms.topk_weights, terms.first_expert, terms.num_experts, top_k


def sum_terms(terms: Terms, second: Tensor | None = None) -> Tensor:
    """`SumTerms`."""
    if second is not None:
        check_second(terms, second)
    if not isinstance(terms, ExpertOutputs):
        return terms if second is None else terms + second
    num_tokens, width = terms.shape
    out = torch.empty(num_tokens, width, dtype=terms.dtype, device=terms.outputs.device)
    products, topk_ids, topk_weights, first_expert, num_experts, top_k = assignment_arguments(terms)
    if num_tokens:
        sum_assignments_kernel[(num_tokens, triton.cdiv(width, BLOCK))](
            products, topk_ids, topk_weights, products if second is None else second.contiguous(), out, first_expert,
            num_experts, width, TOP_K=top_k, HAS_SECOND=second is not None, BLOCK=BLOCK, **pdl_options(out.device),
        )  # fmt: skip
    return out
