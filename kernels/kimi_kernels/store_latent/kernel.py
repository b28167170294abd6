"""Norm, rotate and scatter a step's compressed KV in one Triton-language kernel: a program a few tokens."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.quantization.plain import FP8_MAX
from kimi_kernels.rope.kernel import load_pairs, store_pairs
from kimi_kernels.store_latent.op import check_store_latent

MANY_TOKENS = 1024


@triton.jit
def store_tokens(
    kv_a, norm_weight, cos_sin, positions, cache, slot_mapping, num_tokens, stride, width, num_pairs, eps,
    inverse_scale, limit, TOKENS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Store the tokens of one program of `store_latent_kernel`."""
    column = tl.arange(0, WIDTH)[None, :]
    pair = tl.arange(0, PAIRS)[None, :]
    weight = tl.load(norm_weight + column, mask=column < width, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)
    kept = slot >= 0
    source = kv_a + token * stride
    target = cache + slot * (width + 2 * num_pairs)

    angles = cos_sin + tl.load(positions + token, mask=kept, other=0) * (2 * num_pairs) + pair
    there = kept & (pair < num_pairs)
    cos = tl.load(angles, mask=there, other=0.0)
    sin = tl.load(angles + num_pairs, mask=there, other=0.0)
    first, second = load_pairs(source + width, pair, INTERLEAVED, num_pairs, there)
    kv_c = tl.load(source + column, mask=kept & (column < width), other=0.0).to(tl.float32)

    normed = kv_c * tl.rsqrt(tl.sum(kv_c * kv_c, 1) / width + eps)[:, None] * weight * inverse_scale
    normed = tl.minimum(tl.maximum(normed, -limit), limit)
    tl.store(target + column, normed.to(cache.dtype.element_ty), mask=kept & (column < width))
    turned = tl.minimum(tl.maximum((first * cos - second * sin) * inverse_scale, -limit), limit)
    other = tl.minimum(tl.maximum((second * cos + first * sin) * inverse_scale, -limit), limit)
    store_pairs(target + width, pair, turned, other, INTERLEAVED, num_pairs, there)


@triton.jit(do_not_specialize=["num_tokens"])
def store_latent_kernel(
    kv_a,  # [T, width + 2 * pairs], last dimension contiguous
    norm_weight,  # [width]
    cos_sin,  # [max positions, 2 * pairs] float32
    positions,  # [T] int64
    cache,  # [cache rows, width + 2 * pairs]
    slot_mapping,  # [T] int64
    num_tokens,
    stride,
    width,
    num_pairs,
    eps,
    inverse_scale,
    limit,  # largest value the cache's type holds
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    store_tokens(
        kv_a, norm_weight, cos_sin, positions, cache, slot_mapping, num_tokens, stride, width, num_pairs, eps,
        inverse_scale, limit, TOKENS, WIDTH, PAIRS, INTERLEAVED, PDL,
    )  # fmt: skip


def store_latent(
    kv_a: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    interleaved: bool,
    latent_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: float = 1.0,
) -> None:
    """`StoreLatent`."""
    check_store_latent(kv_a, norm_weight, cos_sin, positions, latent_cache, slot_mapping)
    num_tokens, latent_dim = kv_a.shape
    width = norm_weight.shape[0]
    rope_dim = latent_dim - width
    if not num_tokens:
        return
    tokens = 4 if num_tokens > MANY_TOKENS else 1
    store_latent_kernel[(triton.cdiv(num_tokens, tokens),)](
        kv_a, norm_weight, cos_sin, positions, latent_cache, slot_mapping, num_tokens, kv_a.stride(0), width,
        rope_dim // 2, eps, 1.0 / kv_scale, FP8_MAX if latent_cache.itemsize == 1 else float("inf"),
        TOKENS=tokens, WIDTH=triton.next_power_of_2(width), PAIRS=triton.next_power_of_2(rope_dim // 2),
        INTERLEAVED=interleaved, num_warps=4 if tokens > 1 else 2, **pdl_options(kv_a.device),
    )  # fmt: skip
