"""Routed experts and router at the widths of Kimi-K2: 384 experts of 7168 x 2048, 8 a token; of 2048, a rank of
8, 4 or 2 has 256, 512 or 1024."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_cases import Case, Prepared, num_input_sets, relative_error
from kimi_kernels import KernelSet
from kimi_kernels.moe_route import plain as plain_route
from kimi_kernels.quantization.plain import dequantize, quantize_fp8
from kimi_kernels.weights import (
    ExpertWeights,
    Fp8Weight,
    Int4Weight,
    Mxfp4Weight,
    PackedExperts,
    Weight,
    expert_weight,
)

HIDDEN, NUM_EXPERTS, TOP_K = 7168, 384, 8
BYTES_A_WEIGHT = {"int4": 0.5 + 2 / 32, "mxfp4": 0.5 + 1 / 32, "fp8": 1 + 4 / 128**2, "bf16": 2}
ERROR_LIMIT = 8e-3
"""bf16 activations between the products, bf16 products and result; scaled weights rounded to bf16 in large tiles."""
CHECKED_TOKENS = 128
"""Rows are independent, so that a sample of them is checked."""
ROUTER = {"top_k": TOP_K, "num_groups": 1, "topk_groups": 1, "renormalize": True, "scaling_factor": 2.827}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    kind: str
    width: int
    tokens: int

    @property
    def num_bytes(self) -> float:
        """Experts touched under uniform routing, activations, and each assignment's product written and read once."""
        touched = NUM_EXPERTS * (1 - (1 - TOP_K / NUM_EXPERTS) ** self.tokens)
        weights = touched * 3 * HIDDEN * self.width * BYTES_A_WEIGHT[self.kind]
        return weights + self.tokens * HIDDEN * 2 * (2 + 2 * TOP_K)

    @property
    def num_flops(self) -> float:
        return 2.0 * self.tokens * TOP_K * 3 * HIDDEN * self.width


MUST = {
    (256, 1): (45, None, "vLLM Triton 118"),
    (256, 4): (80, None, "vLLM 243"),
    (256, 16): (190, None, "vLLM 648"),
    (256, 64): (440, None, "vLLM 1751"),
    (256, 256): (620, None, "vLLM 2359"),
    (256, 2048): (1400, None, "vLLM 2446"),
    (2048, 4): (None, 1.35, "Marlin about 1.1x"),
    (2048, 16): (None, 1.35, "Marlin about 1.08x"),
    (2048, 64): (None, 1.35, "Marlin about 1.11x"),
    (2048, 256): (None, 1.35, "Marlin about 1.24x"),
    (2048, 8192): (14_000, None, ""),
}
"""Most microseconds, most floors, and peer on the same kind of card, by (width, tokens)."""
WIDTH_TOKENS = {
    256: (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192),
    512: (1, 4, 16, 64, 256),
    1024: (1, 4, 16, 64, 256),
    2048: (1, 4, 16, 64, 256, 1024, 8192),
}


def cases(kernels: KernelSet) -> list[Case]:
    shapes = [
        Shape(kind="int4", width=width, tokens=tokens) for width, counts in WIDTH_TOKENS.items() for tokens in counts
    ]
    shapes += [
        Shape(kind="mxfp4", width=width, tokens=tokens) for width in (256, 2048) for tokens in (1, 16, 256, 2048)
    ]
    shapes += [Shape(kind="fp8", width=256, tokens=tokens) for tokens in (1, 16, 256)]
    shapes += [Shape(kind="bf16", width=256, tokens=tokens) for tokens in (1, 16, 256)]
    found = [route_case(kernels, tokens) for tokens in (1, 64, 1024)]
    for shape in shapes:
        limit_us, limit_of_floor, peer = MUST.get((shape.width, shape.tokens), (None, None, ""))
        is_int4 = shape.kind == "int4"
        found.append(
            Case(
                op="moe_experts",
                name=f"{shape.kind} width {shape.width} T{shape.tokens}",
                num_bytes=shape.num_bytes,
                num_flops=shape.num_flops,
                prepare=functools.partial(prepare, kernels, shape),
                limit_us=limit_us if is_int4 else None,
                limit_of_floor=limit_of_floor if is_int4 else None,
                peer=peer if is_int4 else "",
            )
        )
    return found


def random_weight(kind: str, rows: int, columns: int) -> Weight:
    """[384, rows, columns] of about unit gain, made in its format so that no plain copy of it has to fit."""
    shape = (NUM_EXPERTS, rows, columns)
    if kind == "int4":
        packed = torch.empty(NUM_EXPERTS, rows, columns // 8, dtype=torch.int32, device="cuda")
        for matrix in packed:
            matrix.random_(-(2**31), 2**31 - 1)
        scales = torch.empty(NUM_EXPERTS, rows, columns // 32, dtype=torch.bfloat16, device="cuda")
        return Int4Weight(packed=packed, scales=scales.uniform_(0.5, 1.5).mul_(0.2 * columns**-0.5))
    if kind == "mxfp4":
        codes = torch.randint(0, 256, (*shape[:2], columns // 2), dtype=torch.uint8, device="cuda")
        # A uniform code has a variance of 8.6.
        exponent = round(math.log2(columns**-0.5 / 8.6**0.5))
        scales = torch.randint(126 + exponent, 129 + exponent, (*shape[:2], columns // 32), device="cuda")
        return Mxfp4Weight(codes=codes, scales=scales.to(torch.uint8))
    plain = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().mul_(columns**-0.5)
    if kind == "bf16":
        return plain
    quantised = [quantize_fp8(matrix) for matrix in plain]
    return Fp8Weight(
        values=torch.stack([weight.values for weight in quantised]),
        scales=torch.stack([weight.scales for weight in quantised]),
    )


@functools.lru_cache(maxsize=1)
def layer(kernels: KernelSet, kind: str, width: int) -> tuple[ExpertWeights, PackedExperts]:
    weights = ExpertWeights(gate_up=random_weight(kind, 2 * width, HIDDEN), down=random_weight(kind, HIDDEN, width))
    return weights, kernels.pack_experts(weights)


def prepare(kernels: KernelSet, shape: Shape) -> Prepared:
    weights, packed = layer(kernels, shape.kind, shape.width)
    # Several calls even where one reads enough: a graph's start is not the layer's time.
    count = num_input_sets(shape.num_bytes, at_least=8 if shape.num_bytes < 1.5e9 else 2)
    inputs = [random_inputs(shape.tokens) for _ in range(count)]

    def run(x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
        return kernels.sum_terms(kernels.moe_experts(x, ids, topk_weights, packed))

    def check() -> float:
        x, ids, topk_weights = inputs[0]
        out = run(x, ids, topk_weights)
        sample = torch.randperm(shape.tokens, device="cuda")[:CHECKED_TOKENS]
        expected = expected_rows(x[sample], ids[sample], topk_weights[sample], weights)
        return relative_error(out[sample], expected, ERROR_LIMIT)

    return Prepared(calls=[functools.partial(run, *given) for given in inputs], check=check)


def random_inputs(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, uniformly random experts, weights that sum to the router's scale."""
    x = torch.randn(num_tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    ids = torch.rand(num_tokens, NUM_EXPERTS, device="cuda").topk(TOP_K, dim=1).indices.to(torch.int32)
    weights = torch.rand(num_tokens, TOP_K, device="cuda")
    return x, ids, weights * 2.827 / weights.sum(dim=1, keepdim=True)


def expected_rows(x: Tensor, ids: Tensor, topk_weights: Tensor, weights: ExpertWeights) -> Tensor:
    """The layer in float32, expert by expert: dequantised whole, only one at a time fits."""
    out = torch.zeros(x.shape[0], HIDDEN, device="cuda")
    for expert in ids.unique().tolist():
        row, assignment = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[row].float() @ dequantize(expert_weight(weights.gate_up, expert)).float().T).chunk(2, dim=1)
        product = (torch.nn.functional.silu(gate) * up) @ dequantize(expert_weight(weights.down, expert)).float().T
        out.index_add_(0, row, product * topk_weights[row, assignment].unsqueeze(1))
    return out


def route_case(kernels: KernelSet, num_tokens: int) -> Case:
    return Case(
        op="moe_route",
        name=f"384 experts T{num_tokens}",
        num_bytes=num_tokens * (NUM_EXPERTS * 4 + TOP_K * 8) + NUM_EXPERTS * 4,
        num_flops=0,
        prepare=functools.partial(prepare_route, kernels, num_tokens),
        peer={1: "", 64: "vLLM grouped_topk 4.8", 1024: "vLLM topk_sigmoid 6.5"}[num_tokens],
    )


def prepare_route(kernels: KernelSet, num_tokens: int) -> Prepared:
    bias = torch.randn(NUM_EXPERTS, device="cuda") * 0.1
    inputs = [torch.randn(num_tokens, NUM_EXPERTS, device="cuda") for _ in range(64)]

    def check() -> float:
        ids, weights = kernels.route_experts(inputs[0], bias, **ROUTER)  # type: ignore[arg-type]
        expected_ids, expected = plain_route.route_experts(inputs[0], bias, **ROUTER)  # type: ignore[arg-type]
        # A near tie may fall either way; the weights of equal scores are equal.
        if float((ids == expected_ids).float().mean()) < 0.999:
            raise AssertionError("more than a thousandth of the experts differ from the reference's")
        return relative_error(weights, expected, 1e-3)

    return Prepared(
        calls=[functools.partial(kernels.route_experts, x, bias, **ROUTER) for x in inputs],  # type: ignore[arg-type]
        check=check,
    )
