# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""`norm_store_latent` in Triton-language: a token has a program that norms its query and one that stores its latent."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.compositions import composed_norm_store_latent
from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.quantization.plain import FP8_MAX
from kimi_kernels.rms_norm.kernel import normalize, rms_norm
from kimi_kernels.store_latent.kernel import MANY_TOKENS, store_latent, store_tokens
from kimi_kernels.store_latent.op import check_query, check_store_latent

_composed = composed_norm_store_latent(rms_norm, store_latent)


@triton.jit(do_not_specialize=["num_tokens"])
def norm_store_latent_kernel(
    query,  # [T, query_width], last dimension contiguous
    query_weight,  # [query_width]
    normed,  # [T, query_width]
    kv_a,  # as the rest: of `store_latent_kernel`
    norm_weight,
    cos_sin,
    positions,
    cache,
    slot_mapping,
    num_tokens,
    query_stride,
    query_width,
    stride,
    width,
    num_pairs,
    eps,
    inverse_scale,
    limit,
    QUERY: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    if tl.program_id(1) == 0:
        column = tl.arange(0, QUERY)
        inside = column < query_width
        weight = tl.load(query_weight + column, mask=inside, other=0.0).to(tl.float32)
        if PDL:
            gdc_wait()
        row = tl.program_id(0).to(tl.int64)
        values = tl.load(query + row * query_stride + column, mask=inside, other=0.0).to(tl.float32)
        result = normalize(values, weight, query_width, eps)
        tl.store(normed + row * query_width + column, result.to(normed.dtype.element_ty), mask=inside)
    else:
        store_tokens(
            kv_a, norm_weight, cos_sin, positions, cache, slot_mapping, num_tokens, stride, width, num_pairs, eps,
            inverse_scale, limit, 1, WIDTH, PAIRS, INTERLEAVED, PDL,
        )  # fmt: skip


def norm_store_latent(
    query: Tensor,
    query_weight: Tensor,
    kv_a: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    interleaved: bool,
    latent_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: float = 1.0,
) -> Tensor:
    """`NormStoreLatent`. Many tokens take two launches: several of them share a program then."""
    num_tokens = kv_a.shape[0]
    if num_tokens == 0 or num_tokens > MANY_TOKENS:
        return _composed(
            query, query_weight, kv_a, norm_weight, eps, cos_sin, positions, interleaved, latent_cache, slot_mapping,
            kv_scale,
        )  # fmt: skip
    check_store_latent(kv_a, norm_weight, cos_sin, positions, latent_cache, slot_mapping)
    check_query(query, query_weight, num_tokens)
    query_width, width = query.shape[1], norm_weight.shape[0]
    num_pairs = (kv_a.shape[1] - width) // 2
    normed = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    block = triton.next_power_of_2(query_width)
    norm_store_latent_kernel[(num_tokens, 2)](
        query, query_weight.contiguous(), normed, kv_a, norm_weight, cos_sin, positions, latent_cache, slot_mapping,
        num_tokens, query.stride(0), query_width, kv_a.stride(0), width, num_pairs, eps, 1.0 / kv_scale,
        FP8_MAX if latent_cache.itemsize == 1 else float("inf"), QUERY=block, WIDTH=triton.next_power_of_2(width),
        PAIRS=triton.next_power_of_2(num_pairs), INTERLEAVED=interleaved, num_warps=min(16, max(2, block // 512)),
        **pdl_options(query.device),
    )  # fmt: skip
    return normed
