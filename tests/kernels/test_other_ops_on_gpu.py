"""Norms, rotary embedding, activation, cache writes and prompt attention compiled, in bf16, against the plain set."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_kernels import KernelSet
from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.compositions import composed_mla_values
from kimi_kernels.mla_prefill import naive
from kimi_kernels.moe_experts.op import ExpertOutputs
from kimi_kernels.moe_experts.plain import sum_terms
from support.attention_cases import PagedCase, paged_case, random_contents, see_more_keys, with_a_key_to_spare
from support.row_errors import worst_row_error

pytestmark = pytest.mark.gpu
PLAIN = KernelSet.plain()
EPS = 1e-6
ERROR_LIMIT = 5e-3
"""norm(error) / norm(row): one rounding to bf16 is 2^-9."""
PREFILL_LIMIT = 1.2e-2
"""The up-projected keys and values, weights and result are rounded to bf16 each."""


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def to_gpu(value: object) -> object:
    if isinstance(value, AttentionBatch):
        tensors = {name: getattr(value, name).cuda() for name in ("cu_seqlens_q", "seq_lens", "block_table")}
        return dataclasses.replace(value, **tensors)
    return value.cuda() if isinstance(value, Tensor) else value


def check(op: str, *arguments: object, limit: float = ERROR_LIMIT) -> None:
    """Compare an op's results, and what it wrote into its last tensor argument, with the plain set's.

    Prefill is judged by its formula: the plain set absorbs it, and rounds its queries to bf16 on the way.
    """
    on_gpu = tuple(map(to_gpu, arguments))
    results = getattr(KernelSet.triton(), op)(*on_gpu)
    if op == "mla_prefill":
        expected = naive.mla_prefill(*arguments).to(results.dtype)  # type: ignore[arg-type]
    else:
        expected = getattr(PLAIN, op)(*arguments)
    if results is None:
        results, expected = ([x for x in where if isinstance(x, Tensor)][-2] for where in (on_gpu, arguments))
    pairs = zip(results, expected, strict=True) if isinstance(results, tuple) else [(results, expected)]
    for out, want in pairs:
        assert out.dtype == want.dtype
        assert worst_row_error(out, want) <= limit


@pytest.mark.parametrize("rows", [1, 4, 63, 1025])
def test_norms_at_full_width(rows: int) -> None:
    width = 7168
    check("rms_norm", randn(rows, width), randn(width), EPS)
    check("add_rms_norm", randn(rows, width), randn(rows, width), randn(width), EPS)
    check("concat_rms_norm", randn(rows, width), randn(width), randn(rows, width), randn(width), EPS)
    check("chunked_rms_norm", randn(rows, 3 * width), randn(3, width), EPS)
    check("rms_norm", randn(rows, 2112)[:, :1536], randn(1536), EPS)
    addends = randn(rows, width), randn(rows, width)
    x, second = (addend.cuda() for addend in addends)
    residual, weight = randn(rows, width).cuda(), randn(width).cuda()
    kernels = KernelSet.triton()
    found = kernels.add_rms_norm(x, residual, weight, EPS, second)
    for out, want in zip(found, kernels.add_rms_norm(x + second, residual, weight, EPS), strict=True):
        assert torch.equal(out, want)


@pytest.mark.parametrize("rows", [1, 65, 1100])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_activation_and_cache_writes(rows: int, interleaved: bool) -> None:
    cos_sin, positions = torch.randn(4096, 64), torch.randint(4096, (rows,))
    slots = torch.randperm(40 * 64)[:rows]
    slots[::7] = -1
    check("rope", randn(rows, 8, 192)[:, :, 128:], cos_sin, positions, interleaved)
    check("silu_mul", randn(rows, 4096))
    cache = torch.zeros(40, 64, 576, dtype=torch.bfloat16)
    check("store_latent", randn(rows, 2112)[:, 1536:], randn(512), EPS, cos_sin, positions, interleaved, cache, slots)
    check(
        "norm_store_latent", randn(rows, 2112)[:, :1536], randn(1536), randn(rows, 2112)[:, 1536:], randn(512), EPS,
        cos_sin, positions, interleaved, cache, slots,
    )  # fmt: skip
    kv_cache = torch.zeros(2, 40, 64, 8, 128, dtype=torch.bfloat16)
    check("store_kv", randn(rows, 8, 128), randn(rows, 8, 128), kv_cache, slots)
    narrow = kv_cache.to(torch.float8_e4m3fn)
    check("store_kv", 100 * randn(rows, 8, 128), randn(rows, 8, 128), narrow, slots, 0.25)


@pytest.mark.parametrize("rows", [1, 5, 64, 256])
def test_a_narrow_layers_second_half(rows: int) -> None:
    """The shapes are those of a rank of eight; gate and up come in float32, beside the router's logits."""
    kernels = KernelSet.triton()
    gate_up = torch.randn(rows, 896, device="cuda")[:, 384:]
    weight = kernels.pack_linear((torch.randn(7168, 256, device="cuda") / 16).bfloat16())
    found = kernels.silu_down(gate_up, weight, torch.bfloat16)
    expected = kernels.linear(kernels.silu_mul(gate_up.bfloat16()), weight)
    assert worst_row_error(found, expected) <= ERROR_LIMIT


@pytest.mark.parametrize("rows", [1, 4, 64, 256])
def test_router_and_a_narrow_layers_second_half(rows: int) -> None:
    """One launch has the bits of two."""
    kernels = KernelSet.triton()
    logits, gate_up = torch.randn(rows, 896, device="cuda").tensor_split([384], dim=1)
    bias = torch.randn(384, device="cuda") * 0.1
    weight = kernels.pack_linear((torch.randn(7168, 256, device="cuda") / 16).bfloat16())
    slots = torch.arange(rows, device="cuda") - 1
    router = {"top_k": 8, "num_groups": 1, "topk_groups": 1, "renormalize": True, "scaling_factor": 2.827}
    *choices, down = kernels.route_silu_down(
        logits,
        bias,
        gate_up,
        weight,
        torch.bfloat16,
        slot_mapping=slots,
        **router,  # type: ignore[arg-type]
    )
    expected = kernels.route_experts(logits, bias, slot_mapping=slots, **router)  # type: ignore[arg-type]
    assert torch.equal(choices[0], expected[0])
    torch.testing.assert_close(choices[1], expected[1], rtol=1e-6, atol=0)
    assert torch.equal(down, kernels.silu_down(gate_up, weight, torch.bfloat16))


@pytest.mark.parametrize("rows", [1, 64, 300])
def test_sums_of_assignments(rows: int) -> None:
    kernels = KernelSet.triton()
    terms = ExpertOutputs(
        outputs=randn(rows * 8, 7168).cuda(),
        topk_ids=torch.randint(-1, 12, (rows, 8), dtype=torch.int32, device="cuda"),
        topk_weights=torch.rand(rows, 8, device="cuda"),
        first_expert=2,
        num_experts=7,
    )
    held = (terms.topk_ids >= 2) & (terms.topk_ids < 9)
    terms.outputs[~held.flatten()] = torch.nan
    second, residual, weight = randn(rows, 7168).cuda(), randn(rows, 7168).cuda(), randn(7168).cuda()
    summed = kernels.sum_terms(terms)
    assert worst_row_error(summed, sum_terms(terms)) <= ERROR_LIMIT
    assert torch.equal(kernels.sum_terms(terms, second), summed + second)
    found = kernels.add_rms_norm(terms, residual, weight, EPS, second)
    for out, want in zip(found, kernels.add_rms_norm(summed, residual, weight, EPS, second), strict=True):
        assert torch.equal(out, want)


@pytest.mark.parametrize("num_heads", [8, 64])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1], [5000]),
        ([4], [1100]),
        ([4, 1, 0, 3, 8, 2], [700, 0, 64, 3000, 129, 65]),
        ([1] * 60, [1100] * 60),
        ([4] * 16, [1100] * 16),
    ],
    ids=["one row", "four rows", "ragged", "many", "sixteen of four"],
)
def test_values_of_heads(query_lens: list[int], seq_lens: list[int], num_heads: int) -> None:
    case = paged_case(query_lens, seq_lens, 64, padding_rows=2)
    q, cache = randn(case.batch.num_tokens, num_heads, 576), paged(case, 576)
    w_uv = (torch.randn(num_heads, 512, 128) / 512**0.5).to(torch.bfloat16)
    check("mla_values", q, cache, case.batch, w_uv, 192**-0.5, limit=PREFILL_LIMIT)
    kernels, on_gpu = KernelSet.triton(), [to_gpu(x) for x in (q, cache, case.batch)]
    again = kernels.mla_values(*on_gpu, w_uv.cuda(), 192**-0.5)  # type: ignore[arg-type]
    composed = composed_mla_values(kernels.mla_decode, kernels.per_head_linear)
    expected = composed(*on_gpu, w_uv.cuda(), 192**-0.5)  # type: ignore[arg-type]
    assert worst_row_error(again, expected) <= ERROR_LIMIT


@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize("heads", [8, 64])
def test_per_head_products(rows: int, heads: int) -> None:
    check("per_head_linear", randn(rows, heads, 512), (torch.randn(heads, 512, 128) / 512**0.5).to(torch.bfloat16))


def paged(case: PagedCase, *width: int) -> Tensor:
    return case.cache(random_contents([len(slots) for slots in case.slots], *width)).to(torch.bfloat16)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (16, 2), (64, 8)])
@pytest.mark.parametrize("window", [None, 100])
def test_mha_attention(num_heads: int, num_kv_heads: int, window: int | None, block_size: int) -> None:
    case = paged_case([4, 1, 0, 140, 1], [700, 0, 64, 300, 65], block_size, padding_rows=3)
    cache = torch.stack([paged(case, num_kv_heads, 128), paged(case, num_kv_heads, 128)])
    q = randn(case.batch.num_tokens, num_heads, 128)
    check("mha_attention", q, cache, case.batch, 128**-0.5, window)
    narrow = (cache / 0.25).to(torch.float8_e4m3fn)
    check("mha_attention", q, narrow, case.batch, 128**-0.5, window, 0.25)


@pytest.mark.parametrize("num_heads", [8, 3])
def test_mla_prefill(num_heads: int) -> None:
    case = paged_case([150, 1, 0, 33, 256, 129, 65], [700, 1, 64, 33, 256, 2000, 383], 64, padding_rows=3)
    check(*prefill_arguments(case, num_heads), limit=PREFILL_LIMIT)


@pytest.mark.parametrize(
    ("num_rows", "length"), [(1, 1), (64, 64), (127, 127), (128, 128), (129, 129), (2, 130), (300, 1300)]
)
def test_mla_prefill_at_the_edges_of_tiles(num_rows: int, length: int) -> None:
    check(*prefill_arguments(paged_case([num_rows], [length], 64), 8), limit=PREFILL_LIMIT)


@pytest.mark.parametrize("num_more_keys", [-1, 1])
def test_a_prefill_whose_causal_bound_is_off_by_one_shows(num_more_keys: int) -> None:
    """Planted fault."""
    case = with_a_key_to_spare(paged_case([30, 2, 129], [61, 141, 300], 64))
    _, *arguments = prefill_arguments(case, 8)
    q, cache, w_uk, w_uv, _, scale = map(to_gpu, arguments)
    shifted = to_gpu(see_more_keys(case.batch, num_more_keys))
    found = KernelSet.triton().mla_prefill(q, cache, w_uk, w_uv, shifted, scale)  # type: ignore[arg-type]
    assert worst_row_error(found, naive.mla_prefill(*arguments)) > 4 * PREFILL_LIMIT  # type: ignore[arg-type]


def test_mla_prefill_in_float16() -> None:
    op, *arguments = prefill_arguments(paged_case([150, 33], [700, 33], 64), 8)
    check(op, *(x.half() if isinstance(x, Tensor) else x for x in arguments), limit=PREFILL_LIMIT)


def test_mla_prefill_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from kimi_kernels.mla_prefill import kernel

    monkeypatch.setattr(kernel, "CHUNK_ROWS", 7 * 8 * 256)
    test_mla_prefill(8)


def test_hopper_has_a_kernel_for_the_heads_of_kimi() -> None:
    """The tests above run it there."""
    from kimi_kernels.mla_prefill.kernel_hopper_launch import fits_hopper

    q = randn(1, 1, 192)
    assert fits_hopper(q.cuda(), 128, 64, 128) == (torch.cuda.get_device_capability()[0] == 9)
    assert not fits_hopper(q.cuda(), 64, 64, 128)
    assert not fits_hopper(q, 128, 64, 128)


def prefill_arguments(case: PagedCase, num_heads: int) -> tuple[Any, ...]:
    """The op and what it takes, of a case with Kimi-K2's widths."""
    return (
        "mla_prefill", randn(case.batch.num_tokens, num_heads, 192), paged(case, 576),
        (torch.randn(num_heads, 128, 512) / 512**0.5).to(torch.bfloat16),
        (torch.randn(num_heads, 512, 128) / 512**0.5).to(torch.bfloat16), case.batch, 192**-0.5,
    )  # fmt: skip
