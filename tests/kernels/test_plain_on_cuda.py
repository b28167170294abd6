"""The plain ops on a CUDA device give what they give on the CPU, within the rounding of float32 products."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kimi_kernels import AttentionBatch, KernelSet
from kimi_kernels.quantization.plain import quantize_fp8, quantize_int4
from kimi_kernels.weights import ExpertWeights, Weight
from support.attention_cases import PagedCase, paged_case, random_contents
from support.bit_equality import Result, assert_same_bits, normals

pytestmark = pytest.mark.gpu

KERNELS = KernelSet.plain()
EPS = 1e-6
TOLERANCE = 1e-4
POSITIONS = torch.arange(20)
COS_SIN = normals(40, 16)
SEQ_LENS = (70, 0, 20)
CASE: PagedCase = paged_case([3, 1, 16], SEQ_LENS)


def to(value: object, device: str) -> object:
    """`value`, with every tensor in it moved."""
    if isinstance(value, Tensor):
        return value.to(device)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        moved = {field.name: to(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **moved)
    return value


def store_latent(kv_a: Tensor, cache: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
    KERNELS.store_latent(kv_a, torch.ones_like(kv_a[0, :32]), EPS, cos_sin, positions, True, cache, slots, 0.5)
    return cache.float()


def store_kv(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    KERNELS.store_kv(k, v, cache, slots)
    return cache.float()


def decode(q: Tensor, cache: Tensor, batch: AttentionBatch) -> Result:
    out, lse = KERNELS.mla_decode(q, cache, batch, 32, 0.2, 0.5, return_lse=True)
    assert lse is not None
    return out, lse


def route(logits: Tensor, bias: Tensor) -> Result:
    return KERNELS.route_experts(
        logits, bias, top_k=4, num_groups=4, topk_groups=2, renormalize=True, scaling_factor=2.5
    )


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    return KERNELS.moe_experts(x, ids, weights, KERNELS.pack_experts(ExpertWeights(gate_up=gate_up, down=down)), 1)


LATENTS = CASE.cache(random_contents(SEQ_LENS, 48))
KV_CACHE = CASE.cache(random_contents(SEQ_LENS, 2, 2, 16)).permute(2, 0, 1, 3, 4).contiguous()
CHOICES = (normals(20, 8).argsort(-1)[:, :3].to(torch.int32), normals(20, 3))
SLOTS = torch.randperm(64)[:20].index_fill(0, torch.tensor([4]), -1)
CALLS: dict[str, tuple[Callable[..., Result], tuple[object, ...]]] = {
    "linear": (lambda x, w: KERNELS.linear(x, KERNELS.pack_linear(w)), (normals(20, 64), normals(48, 64).bfloat16())),
    "per_head_linear": (KERNELS.per_head_linear, (normals(20, 4, 16), normals(4, 16, 32).bfloat16())),
    "rms_norm": (lambda x, w: KERNELS.rms_norm(x, w, EPS), (normals(20, 64), normals(64))),
    "add_rms_norm": (lambda x, r, w: KERNELS.add_rms_norm(x, r, w, EPS), (normals(20, 64),) * 2 + (normals(64),)),
    "concat_rms_norm": (lambda x, w: KERNELS.concat_rms_norm(x, w, x, w, EPS), (normals(20, 64), normals(64))),
    "chunked_rms_norm": (lambda x, w: KERNELS.chunked_rms_norm(x, w, EPS), (normals(20, 63), normals(3, 21))),
    "silu_mul": (KERNELS.silu_mul, (normals(20, 64),)),
    "rope": (lambda x, c, p: KERNELS.rope(x, c, p, True), (normals(20, 4, 16), COS_SIN, POSITIONS)),
    "store_latent": (
        store_latent,
        (normals(20, 48), torch.zeros(4, 16, 48).to(torch.float8_e4m3fn), COS_SIN, POSITIONS, SLOTS),
    ),
    "store_kv": (
        store_kv,
        (normals(20, 2, 16), normals(20, 2, 16, seed=2), torch.zeros(2, 4, 16, 2, 16).bfloat16(), SLOTS),
    ),
    "mla_decode": (decode, (normals(20, 4, 48), LATENTS, CASE.batch)),
    "mla_decode fp8": (decode, (normals(20, 4, 48), LATENTS.to(torch.float8_e4m3fn), CASE.batch)),
    "mla_prefill": (
        lambda q, cache, w_uk, w_uv, batch: KERNELS.mla_prefill(q, cache, w_uk, w_uv, batch, 0.2),
        (normals(20, 4, 32), LATENTS, normals(4, 16, 32), normals(4, 32, 16), CASE.batch),
    ),
    "mha_attention": (
        lambda q, cache, batch: KERNELS.mha_attention(q, cache, batch, 0.3, 30),
        (normals(20, 4, 16), KV_CACHE, CASE.batch),
    ),
    "route_experts": (route, (normals(20, 24), normals(24))),
    "moe_experts": (experts, (normals(20, 64), *CHOICES, normals(6, 64, 64) / 8, normals(6, 64, 32))),
    "moe_experts int4": (
        experts,
        (normals(20, 64), *CHOICES, quantize_int4(normals(6, 64, 64) / 8), quantize_int4(normals(6, 64, 32))),
    ),
    "moe_experts fp8": (
        experts,
        (normals(20, 64), *CHOICES, quantize_fp8(normals(6, 64, 64) / 8), quantize_fp8(normals(6, 64, 32))),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_device_does_not_matter(name: str) -> None:
    call, arguments = CALLS[name]
    on_cpu = call(*(to(argument, "cpu") for argument in arguments))
    on_cuda = call(*(to(argument, "cuda") for argument in arguments))
    pairs = zip(on_cuda, on_cpu, strict=True) if isinstance(on_cuda, tuple) else [(on_cuda, on_cpu)]
    for got, expected in pairs:
        assert got.is_cuda
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got.cpu(), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("num_rows", [1, 3, 40, 513, 700])
def test_a_row_has_the_same_bits_beside_other_rows(num_rows: int) -> None:
    """Products of sizes like kimi-nano's: the first rows alone, and among 1,300."""
    all_rows, hidden = 1300, 192
    x = normals(all_rows, hidden).cuda()
    linear = KERNELS.pack_linear(normals(4096, hidden, seed=2).cuda())
    packed = KERNELS.pack_experts(
        ExpertWeights(gate_up=normals(12, 256, hidden, seed=3).cuda() / 14, down=normals(12, hidden, 128).cuda() / 11)
    )
    ids = normals(all_rows, 12).argsort(-1)[:, :3].to(torch.int32).cuda()
    weights = normals(all_rows, 3).abs().cuda()
    heads, w_uk = normals(all_rows, 8, 32).cuda(), normals(8, 32, 64).cuda()
    lengths = [1 + (7 * i) % 600 for i in range(all_rows)]
    contents = random_contents(lengths, 80)
    q = normals(all_rows, 8, 80).cuda()

    def attention(count: int) -> Tensor:
        case = paged_case([1] * count, lengths[:count])
        batch = to(case.batch, "cuda")
        assert isinstance(batch, AttentionBatch)
        return KERNELS.mla_decode(q[:count], case.cache(contents[:count]).cuda(), batch, 64, 0.1)[0]

    calls: dict[str, Callable[[int], Tensor]] = {
        "linear": lambda count: KERNELS.linear(x[:count], linear),
        "per_head_linear": lambda count: KERNELS.per_head_linear(heads[:count], w_uk),
        "moe_experts": lambda count: KERNELS.moe_experts(x[:count], ids[:count], weights[:count], packed),
        "mla_decode": attention,
        "rms_norm": lambda count: KERNELS.rms_norm(x[:count], x[0], EPS),
    }
    for name, call in calls.items():
        assert_same_bits(call(num_rows), call(all_rows)[:num_rows], name)
