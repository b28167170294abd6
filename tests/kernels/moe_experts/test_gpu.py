"""The compiled expert kernels in bf16, against float64 products on the same device."""

import dataclasses

import pytest
import torch

from kimi_kernels.moe_experts import kernel, kernel_layer, naive
from kimi_kernels.moe_experts.kernel_sum import sum_terms
from kimi_kernels.moe_experts.launch import PERSISTENT_COLUMNS, HopperShapes, sorted_launch
from kimi_kernels.weights import ExpertWeights, Mxfp4Weight
from support.expert_layers import random_assignments, random_experts
from support.row_errors import worst_row_error

pytestmark = pytest.mark.gpu
ASSIGNMENTS = (1500, 0, 1, 32, 33, 64, 65, 96, 97, 128, 129, 160, 161, 192, 193, 400)
MXFP4_TOLERANCE = 7e-3
"""bf16 activations between the products, bf16 products and result."""
TOLERANCE = 6e-3
"""bf16 activations between the products, bf16 products and result; from 32 columns on, scaled weights in bf16."""


@pytest.mark.parametrize("kind", ["int4", "mxfp4", "fp8", "float"])
@pytest.mark.parametrize("intermediate", [256, 512, 96])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 9, 33, 130, 513, 1100])
def test_experts(kind: str, intermediate: int, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    weights = random_experts(kind, 12, 1024, intermediate, "cuda", torch.bfloat16)
    x = torch.randn(num_tokens, 1024, device="cuda", dtype=torch.bfloat16)
    ids, topk_weights = random_assignments(num_tokens, 15, 4, "cuda")
    packed = kernel.pack_experts(weights)
    out = sum_terms(kernel.moe_experts(x, ids, topk_weights, packed, first_expert=2))
    expected = naive.moe_experts(x, ids, topk_weights, weights, first_expert=2)
    assert worst_row_error(out, expected) < TOLERANCE
    assert torch.equal(out, sum_terms(kernel.moe_experts(x, ids, topk_weights, packed, first_expert=2)))


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("rows", [128, 256])
def test_overlapped_products_have_the_bits_of_the_plain_ones(kind: str, columns: int, rows: int) -> None:
    torch.manual_seed(0)
    packed = kernel.pack_experts(random_experts(kind, 6, 1024, 512, "cuda"))
    x = torch.randn(700, 1024, device="cuda", dtype=torch.bfloat16)
    ids, weights = random_assignments(700, 6, 3, "cuda")
    layer = kernel_layer.Layer(x, ids, weights, packed, 0)
    plain = dataclasses.replace(
        sorted_launch(layer.num_assignments, 6, layer.down_steps, layer.hopper_shapes()),
        columns=columns,
        gate_up_tall_rows=0,
        down_tall_rows=0,
        stages=2,
    )
    tall = dataclasses.replace(plain, gate_up_tall_rows=rows, down_tall_rows=rows)
    order = kernel_layer.sort_assignments(layer, columns)
    hidden = kernel_layer.gate_up_sorted(layer, plain, order)
    assert torch.equal(kernel_layer.gate_up_sorted(layer, tall, order), hidden)
    assert torch.equal(
        kernel_layer.down_sorted(layer, tall, order, hidden), kernel_layer.down_sorted(layer, plain, order, hidden)
    )


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
@pytest.mark.parametrize("width", [512, 256])
def test_persistent_products_have_the_bits_of_the_plain_ones(kind: str, width: int) -> None:
    """Experts with 0 to 1,500 assignments: tiles of every width, several of an expert, more of them than blocks."""
    torch.manual_seed(0)
    num_experts = len(ASSIGNMENTS)
    packed = kernel.pack_experts(random_experts(kind, num_experts, 1024, width, "cuda"))
    experts = torch.repeat_interleave(torch.arange(num_experts), torch.tensor(ASSIGNMENTS))
    ids = experts[torch.randperm(len(experts))].view(-1, 1).to("cuda", torch.int32)
    x = torch.randn(len(ids), 1024, device="cuda", dtype=torch.bfloat16)
    layer = kernel_layer.Layer(x, ids, torch.ones(len(ids), 1, device="cuda"), packed, 0)
    plain = sorted_launch(layer.num_assignments, num_experts, layer.down_steps, HopperShapes())
    persistent = dataclasses.replace(plain, columns=PERSISTENT_COLUMNS)
    orders = [kernel_layer.sort_assignments(layer, launch.columns) for launch in (plain, persistent)]
    hidden = kernel_layer.gate_up_sorted(layer, plain, orders[0])
    assert torch.equal(kernel_layer.gate_up_sorted(layer, persistent, orders[1]), hidden)
    products = kernel_layer.down_sorted(layer, plain, orders[0], hidden)
    assert torch.equal(kernel_layer.down_sorted(layer, persistent, orders[1], hidden), products)


@pytest.mark.parametrize("kind", ["int4", "mxfp4", "fp8", "float"])
def test_pairs_of_halves_have_the_bits_of_tiles_of_eight(kind: str) -> None:
    torch.manual_seed(0)
    packed = kernel.pack_experts(random_experts(kind, 12, 1024, 512, "cuda", torch.bfloat16))
    x = torch.randn(48, 1024, device="cuda", dtype=torch.bfloat16)
    ids, weights = random_assignments(48, 12, 2, "cuda")
    layer = kernel_layer.Layer(x, ids, weights, packed, 0)
    pairs = sorted_launch(layer.num_assignments, 12, layer.down_steps, layer.hopper_shapes())
    assert pairs.columns == 16
    found = []
    for launch in (pairs, dataclasses.replace(pairs, columns=8)):
        order = kernel_layer.sort_assignments(layer, launch.columns)
        hidden = kernel_layer.gate_up_sorted(layer, launch, order)
        found.append((hidden, kernel_layer.down_sorted(layer, launch, order, hidden)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("num_tokens", [1, 16, 48, 256, 2000])
def test_every_code_and_scale_of_mxfp4(num_tokens: int) -> None:
    """Every code, scales from 2^-33 to 2: nothing is rounded but activations, sums and results."""
    torch.manual_seed(num_tokens)
    matrices = []
    for rows, columns in ((1024, 1024), (1024, 512)):
        codes = torch.randint(0, 256, (16, rows, columns // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(117, 124, (16, rows, columns // 32), dtype=torch.uint8, device="cuda")
        scales[:, :, 0] = torch.randint(94, 129, (16, rows), dtype=torch.uint8, device="cuda")
        matrices.append(Mxfp4Weight(codes=codes, scales=scales))
    weights = ExpertWeights(gate_up=matrices[0], down=matrices[1])
    x = torch.randn(num_tokens, 1024, device="cuda", dtype=torch.bfloat16)
    ids, topk_weights = random_assignments(num_tokens, 16, 4, "cuda")
    out = sum_terms(kernel.moe_experts(x, ids, topk_weights, kernel.pack_experts(weights)))
    assert worst_row_error(out, naive.moe_experts(x, ids, topk_weights, weights)) < MXFP4_TOLERANCE


@pytest.mark.parametrize("num_tokens", [2, 200])
def test_a_graph_replays_with_other_assignments(num_tokens: int) -> None:
    """Grids and scratch do not depend on what the router chose."""
    torch.manual_seed(0)
    weights = random_experts("int4", 12, 512, 256, "cuda")
    packed = kernel.pack_experts(weights)
    x = torch.randn(num_tokens, 512, device="cuda", dtype=torch.bfloat16)
    ids, topk_weights = random_assignments(num_tokens, 12, 4, "cuda")
    kernel.moe_experts(x, ids, topk_weights, packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sum_terms(kernel.moe_experts(x, ids, topk_weights, packed))
    for skewed in (False, True):
        fresh = (
            torch.arange(4, device="cuda").expand_as(ids)
            if skewed
            else random_assignments(num_tokens, 12, 4, "cuda")[0]
        )
        ids.copy_(fresh)
        x.normal_()
        graph.replay()
        assert worst_row_error(out, naive.moe_experts(x, ids, topk_weights, weights)) < TOLERANCE
