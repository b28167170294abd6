"""The compiled expert kernels in bf16, against the float32 reference on the same device."""

import dataclasses

import pytest
import torch

from kimi_kernels.moe_experts import kernel, kernel_layer, reference
from kimi_kernels.moe_experts.launch import sorted_launch
from support.expert_layers import expected_experts, random_choices, random_experts
from support.row_errors import worst_row_error

pytestmark = pytest.mark.gpu
TOLERANCE = 6e-3
"""bf16 activations between the products, bf16 products and result; from 32 columns on, scaled weights in bf16."""


@pytest.mark.parametrize("kind", ["int4", "fp8", "float"])
@pytest.mark.parametrize("intermediate", [256, 512, 96])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 9, 33, 130, 513, 1100])
def test_against_reference(kind: str, intermediate: int, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    weights = random_experts(kind, 12, 1024, intermediate, "cuda", torch.bfloat16)
    x = torch.randn(num_tokens, 1024, device="cuda", dtype=torch.bfloat16)
    ids, topk_weights = random_choices(num_tokens, 15, 4, "cuda")
    packed = kernel.pack_experts(weights)
    out = kernel.moe_experts(x, ids, topk_weights, packed, first_expert=2)
    expected = expected_experts(x, ids, topk_weights, reference.pack_experts(weights), first_expert=2)
    assert worst_row_error(out, expected) < TOLERANCE
    assert torch.equal(out, kernel.moe_experts(x, ids, topk_weights, packed, first_expert=2))


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("rows", [128, 256])
def test_overlapped_products_have_the_bits_of_the_plain_ones(columns: int, rows: int) -> None:
    torch.manual_seed(0)
    packed = kernel.pack_experts(random_experts("int4", 6, 1024, 512, "cuda"))
    x = torch.randn(700, 1024, device="cuda", dtype=torch.bfloat16)
    ids, weights = random_choices(700, 6, 3, "cuda")
    layer = kernel_layer.Layer(x, ids, weights, packed, 0)
    plain = dataclasses.replace(
        sorted_launch(layer.num_choices, 6, layer.down_steps, layer.tall_shapes()),
        columns=columns,
        gate_up_tall_rows=0,
        down_tall_rows=0,
        gate_up_stages=2,
        down_stages=2,
    )
    tall = dataclasses.replace(plain, gate_up_tall_rows=rows, down_tall_rows=rows)
    order = kernel_layer.sort_choices(layer, columns)
    hidden = kernel_layer.gate_up_sorted(layer, plain, order)
    assert torch.equal(kernel_layer.gate_up_sorted(layer, tall, order), hidden)
    assert torch.equal(
        kernel_layer.down_sorted(layer, tall, order, hidden), kernel_layer.down_sorted(layer, plain, order, hidden)
    )


@pytest.mark.parametrize("num_tokens", [2, 200])
def test_a_graph_replays_with_other_choices(num_tokens: int) -> None:
    """Grids and scratch do not depend on what the router chose."""
    torch.manual_seed(0)
    weights = random_experts("int4", 12, 512, 256, "cuda")
    packed, expected_weights = kernel.pack_experts(weights), reference.pack_experts(weights)
    x = torch.randn(num_tokens, 512, device="cuda", dtype=torch.bfloat16)
    ids, topk_weights = random_choices(num_tokens, 12, 4, "cuda")
    kernel.moe_experts(x, ids, topk_weights, packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.moe_experts(x, ids, topk_weights, packed)
    for skewed in (False, True):
        fresh = (
            torch.arange(4, device="cuda").expand_as(ids) if skewed else random_choices(num_tokens, 12, 4, "cuda")[0]
        )
        ids.copy_(fresh)
        x.normal_()
        graph.replay()
        assert worst_row_error(out, expected_experts(x, ids, topk_weights, expected_weights)) < TOLERANCE
