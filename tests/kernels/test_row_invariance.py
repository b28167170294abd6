"""Row invariance: a row's result has the same bits whatever rows run beside it.

Everything that compares tokens with `==` stands on this, so it comes first, op by op: the parameter of a failing test
is the name of the op that broke.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kimi_kernels import KernelSet
from kimi_kernels.quantization.plain import quantize_fp8, quantize_int4
from kimi_kernels.weights import ExpertWeights, Weight
from support.bit_equality import Result, assert_same_bits, normals, pick_rows

NUM_ROWS = 64
MANY_ROWS = 203
EPS = 1e-6


@dataclass(frozen=True)
class RowOp:
    """An op as a function of inputs that all have one entry a row."""

    run: Callable[..., Result]
    widths: tuple[tuple[int, ...], ...]
    """The shape of a row of each input."""
    scale: float = 1.0
    dtype: torch.dtype = torch.float32

    def inputs(self, num_rows: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(7)
        return tuple(
            (torch.randn(num_rows, *width, generator=generator) * self.scale).to(self.dtype) for width in self.widths
        )


def linear_op(
    kernels: KernelSet,
    in_features: int,
    out_features: int,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
) -> RowOp:
    weight = kernels.pack_linear(normals(out_features, in_features).to(weight_dtype))
    return RowOp(lambda x: kernels.linear(x, weight), ((in_features,),), dtype=dtype)


def quantized_linear_op(kernels: KernelSet, weight: Weight, in_features: int) -> RowOp:
    packed = kernels.pack_linear(weight)
    return RowOp(lambda x: kernels.linear(x, packed), ((in_features,),))


def per_head_op(kernels: KernelSet, num_heads: int, in_features: int, out_features: int) -> RowOp:
    weight = normals(num_heads, in_features, out_features)
    return RowOp(lambda x: kernels.per_head_linear(x, weight), ((num_heads, in_features),))


def rope_op(kernels: KernelSet, num_heads: int, width: int, *, interleaved: bool) -> RowOp:
    angles = torch.arange(2 * NUM_ROWS)[:, None] * normals(width // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)

    def run(x: Tensor, position: Tensor) -> Tensor:
        positions = (position[:, 0].abs() * 30).long().clamp(max=2 * NUM_ROWS - 1)
        return kernels.rope(x, cos_sin, positions, interleaved)

    return RowOp(run, ((num_heads, width), (1,)))


def store_latent_op(kernels: KernelSet, kv_lora_rank: int, width: int) -> RowOp:
    weight, cos_sin = normals(kv_lora_rank), normals(1, width)

    def run(kv_a: Tensor) -> Tensor:
        num_rows = kv_a.shape[0]
        cache = torch.full((num_rows, 1, kv_lora_rank + width), torch.nan)
        positions = torch.zeros(num_rows, dtype=torch.int64)
        kernels.store_latent(kv_a, weight, EPS, cos_sin, positions, True, cache, torch.arange(num_rows))
        return cache[:, 0]

    return RowOp(run, ((kv_lora_rank + width,),))


def store_kv_op(kernels: KernelSet, num_kv_heads: int, head_dim: int) -> RowOp:
    def run(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        cache = torch.full((2, k.shape[0], 1, num_kv_heads, head_dim), torch.nan)
        kernels.store_kv(k, v, cache, torch.arange(k.shape[0]))
        return cache[0], cache[1]

    return RowOp(run, ((num_kv_heads, head_dim),) * 2)


def route_op(
    kernels: KernelSet, num_experts: int, top_k: int, num_groups: int, topk_groups: int, scale: float = 1.0
) -> RowOp:
    bias = normals(num_experts)

    def run(router_logits: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.route_experts(
            router_logits,
            bias,
            top_k=top_k,
            num_groups=num_groups,
            topk_groups=topk_groups,
            renormalize=True,
            scaling_factor=2.827,
        )

    return RowOp(run, ((num_experts,),), scale)


def experts_op(
    kernels: KernelSet, quantize: Callable[[Tensor], Weight], *, first_expert: int = 0, hidden: int = 64
) -> RowOp:
    """Six experts, of which each row takes three; with `first_expert`, some choices are held elsewhere."""
    num_experts, intermediate, num_choices = 6, 32, 3
    packed = kernels.pack_experts(
        ExpertWeights(
            gate_up=quantize(normals(num_experts, 2 * intermediate, hidden)),
            down=quantize(normals(num_experts, hidden, intermediate)),
        )
    )

    def run(x: Tensor, preference: Tensor, weights: Tensor) -> Tensor:
        topk_ids = preference.argsort(dim=-1)[:, :num_choices].to(torch.int32)
        return kernels.moe_experts(x, topk_ids, weights, packed, first_expert)

    return RowOp(run, ((hidden,), (num_experts,), (num_choices,)))


def row_ops(kernels: KernelSet) -> dict[str, RowOp]:
    return {
        "linear 64x192": linear_op(kernels, 64, 192),
        "linear 48x16": linear_op(kernels, 48, 16),
        "linear 63x3": linear_op(kernels, 63, 3),
        "linear 1x1": linear_op(kernels, 1, 1),
        "linear 512x1000": linear_op(kernels, 512, 1000),
        "linear bf16": linear_op(kernels, 64, 192, torch.bfloat16),
        "linear bf16 weight 192x272": linear_op(kernels, 192, 272, weight_dtype=torch.bfloat16),
        "linear bf16 weight 1100x63": linear_op(kernels, 1100, 63, weight_dtype=torch.bfloat16),
        "linear bf16 weight 7x5": linear_op(kernels, 7, 5, weight_dtype=torch.bfloat16),
        "linear int4": quantized_linear_op(kernels, quantize_int4(normals(48, 64)), 64),
        "linear fp8": quantized_linear_op(kernels, quantize_fp8(normals(48, 160)), 160),
        "per_head_linear": per_head_op(kernels, 4, 16, 32),
        "per_head_linear odd": per_head_op(kernels, 3, 7, 5),
        "rms_norm": RowOp(lambda x: kernels.rms_norm(x, normals(64), EPS), ((64,),)),
        "rms_norm odd": RowOp(lambda x: kernels.rms_norm(x, normals(63), EPS), ((63,),), 1e3),
        "rms_norm wide": RowOp(lambda x: kernels.rms_norm(x, normals(7168), EPS), ((7168,),)),
        "add_rms_norm": RowOp(lambda x, r: kernels.add_rms_norm(x, r, normals(65), EPS), ((65,), (65,))),
        "concat_rms_norm": RowOp(
            lambda a, b: kernels.concat_rms_norm(a, normals(48), b, normals(33, seed=2), EPS), ((48,), (33,))
        ),
        "chunked_rms_norm": RowOp(lambda x: kernels.chunked_rms_norm(x, normals(3, 21), EPS), ((63,),)),
        "silu_mul": RowOp(kernels.silu_mul, ((64,),)),
        "silu_mul odd": RowOp(kernels.silu_mul, ((14,),), 20.0),
        "rope interleaved": rope_op(kernels, 4, 16, interleaved=True),
        "rope halves": rope_op(kernels, 3, 10, interleaved=False),
        "store_latent": store_latent_op(kernels, 32, 16),
        "store_latent odd": store_latent_op(kernels, 31, 6),
        "store_kv": store_kv_op(kernels, 2, 16),
        "route_experts": route_op(kernels, 8, 2, 1, 1),
        "route_experts groups": route_op(kernels, 24, 4, 4, 2),
        "route_experts odd": route_op(kernels, 63, 8, 1, 1, 8.0),
        "moe_experts none": experts_op(kernels, lambda weight: weight),
        "moe_experts none odd": experts_op(kernels, lambda weight: weight, hidden=63),
        "moe_experts bf16": experts_op(kernels, lambda weight: weight.bfloat16()),
        "moe_experts bf16 odd": experts_op(kernels, lambda weight: weight.bfloat16(), hidden=63),
        "moe_experts int4": experts_op(kernels, quantize_int4),
        "moe_experts fp8": experts_op(kernels, lambda weight: quantize_fp8(weight, 24)),
        "moe_experts some held elsewhere": experts_op(kernels, lambda weight: weight, first_expert=2),
    }


ROW_OPS = row_ops(KernelSet.plain())
SOME_OPS = [
    "linear 64x192", "linear 512x1000", "linear bf16 weight 192x272", "per_head_linear", "moe_experts none",
    "moe_experts bf16", "rms_norm wide",
]  # fmt: skip


@pytest.mark.parametrize("name", ROW_OPS)
def test_a_row_does_not_depend_on_how_many_rows_follow(name: str) -> None:
    op = ROW_OPS[name]
    inputs = op.inputs(NUM_ROWS)
    together = op.run(*inputs)
    for count in range(1, NUM_ROWS + 1):
        first_rows = torch.arange(count)
        alone = op.run(*(x[:count] for x in inputs))
        assert_same_bits(alone, pick_rows(together, first_rows), f"{name}: the first {count} of {NUM_ROWS} rows")


@pytest.mark.parametrize("name", ROW_OPS)
def test_a_row_does_not_depend_on_which_rows_run_beside_it(name: str) -> None:
    op = ROW_OPS[name]
    inputs = op.inputs(MANY_ROWS)
    together = op.run(*inputs)
    generator = torch.Generator().manual_seed(3)
    subsets = [torch.tensor([row]) for row in range(0, MANY_ROWS, 7)]
    subsets += [torch.randperm(MANY_ROWS, generator=generator)[:count] for count in (2, 3, 15, 16, 17, 40, 64, 100)]
    for rows in subsets:
        assert_same_bits(op.run(*(x[rows] for x in inputs)), pick_rows(together, rows), f"{name}: rows {rows.tolist()}")


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", SOME_OPS)
def test_two_threads_do_not_change_that(name: str) -> None:
    op = ROW_OPS[name]
    inputs = op.inputs(NUM_ROWS)
    together = op.run(*inputs)
    for count in (1, 2, 3, 4, 15, 16, 17, 33, 63):
        last_rows = torch.arange(NUM_ROWS - count, NUM_ROWS)
        assert_same_bits(op.run(*(x[-count:] for x in inputs)), pick_rows(together, last_rows), f"{name}: {count} rows")


@pytest.mark.usefixtures("two_threads")
def test_two_threads_do_not_cut_a_row_of_a_long_activation() -> None:
    """Widths and lengths whose halves end inside a row."""
    kernels = KernelSet.plain()
    for num_rows, width in ((1001, 2 * 40), (701, 2 * 160), (999, 2 * 37)):
        gate_up = normals(num_rows, width)
        together = kernels.silu_mul(gate_up)
        for row in range(0, num_rows, 10):
            assert_same_bits(kernels.silu_mul(gate_up[row : row + 1]), together[row : row + 1], f"row {row}")
        middle = num_rows // 2
        near = slice(middle - 2, middle + 3)
        assert_same_bits(kernels.silu_mul(gate_up[near]), together[near], f"{width}: rows around the middle")


@pytest.mark.parametrize("name", [*SOME_OPS, "rms_norm"])
def test_a_row_does_not_depend_on_where_it_lies_in_memory(name: str) -> None:
    op = ROW_OPS[name]
    inputs = op.inputs(16)
    expected = op.run(*inputs)
    for offset in range(1, 17, 3):
        shifted = [torch.empty(x.numel() + offset)[offset:].view_as(x).copy_(x) for x in inputs]
        assert_same_bits(op.run(*shifted), expected, f"{name}: {4 * offset} bytes off")


def test_not_a_number_stays_in_its_row() -> None:
    for name, op in ROW_OPS.items():
        if "route" in name:
            continue
        inputs = op.inputs(20)
        expected = op.run(*inputs)
        inputs[0][0] = torch.nan
        others = torch.arange(1, 20)
        assert_same_bits(pick_rows(op.run(*inputs), others), pick_rows(expected, others), name)
