"""Dense linear layers of few rows: a quantised draft's head and projections, plain ones, and cuBLAS on the same."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_cases import Case, Prepared, num_input_sets, relative_error
from kimi_kernels import KernelSet
from kimi_kernels.quantization.plain import dequantize, quantize_fp8
from kimi_kernels.weights import Int4Weight, Weight

BYTES_A_WEIGHT = {"int4": 0.5 + 2 / 32, "fp8": 1 + 4 / 128**2, "bf16": 2, "cuBLAS bf16": 2}
ERROR_LIMIT = 4e-3
"""A bf16 result; products and sums are float32."""
HEAD = (7168, 163_840)
QKV_A = (14_336, 2112)
"""The draft's, which reads twice the width."""
PLAIN = (
    (7168, 2112),
    (1536, 12_288),
    (8192, 7168),
    (7168, 4096),
    (2048, 7168),
    (7168, 36_864),
    (18_432, 7168),
    (21_504, 7168),
    QKV_A,
    HEAD,
)
"""Kimi-K2.5's: qkv_a, q_b, o; the shared expert's two; the dense layer's two; fc, qkv_a and head of the draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    kind: str
    in_features: int
    out_features: int
    rows: int

    @property
    def weight_bytes(self) -> float:
        return self.in_features * self.out_features * BYTES_A_WEIGHT[self.kind]

    @property
    def num_bytes(self) -> float:
        return self.weight_bytes + self.rows * (self.in_features + self.out_features) * 2


def cases(kernels: KernelSet) -> list[Case]:
    found = []
    for (in_features, out_features), kind, counts in (
        (HEAD, "int4", (1, 4, 8, 16, 32, 64)),
        (HEAD, "fp8", (1, 8, 16, 64)),
        (QKV_A, "int4", (1, 8)),
        (QKV_A, "fp8", (1, 8)),
        *((shape, kind, (1, 4, 16)) for shape in PLAIN for kind in ("bf16", "cuBLAS bf16")),
        (HEAD, "bf16", (64,)),
        (HEAD, "cuBLAS bf16", (64,)),
    ):
        for rows in counts:
            shape = Shape(kind=kind, in_features=in_features, out_features=out_features, rows=rows)
            found.append(
                Case(
                    op="linear",
                    name=f"{kind} {in_features}>{out_features} M{rows}",
                    num_bytes=shape.num_bytes,
                    num_flops=2.0 * rows * in_features * out_features,
                    prepare=functools.partial(prepare, kernels, shape),
                    limit_of_floor=1.4 if kind == "int4" and out_features == HEAD[1] and rows <= 8 else None,
                    peer="" if "bf16" in kind else "cuBLAS bf16 793" if out_features == HEAD[1] else "cuBLAS bf16 25.9",
                )
            )
    return found


def random_weight(shape: Shape) -> Weight:
    rows, columns = shape.out_features, shape.in_features
    if shape.kind == "int4":
        packed = torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), dtype=torch.int32, device="cuda")
        scales = torch.empty(rows, columns // 32, dtype=torch.bfloat16, device="cuda").uniform_(0.5, 1.5)
        return Int4Weight(packed=packed, scales=scales.mul_(0.2 * columns**-0.5))
    plain = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_().mul_(columns**-0.5)
    return quantize_fp8(plain) if shape.kind == "fp8" else plain


def prepare(kernels: KernelSet, shape: Shape) -> Prepared:
    # Enough copies of the weight that it does not sit in the L2 cache.
    weights = [random_weight(shape) for _ in range(num_input_sets(shape.num_bytes, at_least=1))]
    is_peer = shape.kind == "cuBLAS bf16"
    product: Callable[[Tensor, Any], Tensor] = torch.nn.functional.linear if is_peer else kernels.linear
    packed = weights if is_peer else [kernels.pack_linear(weight) for weight in weights]
    x = torch.randn(shape.rows, shape.in_features, device="cuda").to(torch.bfloat16)
    expected = x.float() @ dequantize(weights[0]).float().T
    del weights

    def check() -> float:
        return relative_error(product(x, packed[0]), expected, ERROR_LIMIT)

    calls = [functools.partial(product, x, weight) for weight in packed]
    return Prepared(calls=calls * max(1, 4 // len(calls)), check=check)
