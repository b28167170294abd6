"""The reference experts against a naive float64 sum over each token's choices."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kimi_kernels.moe_experts.reference import moe_experts, pack_experts
from kimi_kernels.quantization.mxfp4 import quantize_mxfp4
from kimi_kernels.quantization.reference import dequantize, quantize_fp8, quantize_int4
from kimi_kernels.weights import ExpertWeights, Weight

TOLERANCE = 1e-4


def naive_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor, first_expert: int = 0
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    intermediate = down.shape[2]
    for token, ids in enumerate(topk_ids.tolist()):
        for choice, expert in enumerate(ids):
            if not first_expert <= expert < first_expert + down.shape[0]:
                continue
            hidden = gate_up[expert - first_expert].double() @ x[token].double()
            gate, up = hidden[:intermediate], hidden[intermediate:]
            result = down[expert - first_expert].double() @ (gate * torch.sigmoid(gate) * up)
            out[token] += topk_weights[token, choice].double() * result
    return out


def choices(num_tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(num_tokens, num_experts).argsort(dim=-1)[:, :top_k].to(torch.int32)
    return ids, torch.rand(num_tokens, top_k)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 63, 65])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden", "intermediate"), [(1, 1, 1, 1), (4, 4, 16, 16), (9, 3, 63, 5), (40, 2, 32, 33)]
)
def test_experts(num_tokens: int, num_experts: int, top_k: int, hidden: int, intermediate: int) -> None:
    torch.manual_seed(num_tokens)
    gate_up = torch.randn(num_experts, 2 * intermediate, hidden) / hidden**0.5
    down = torch.randn(num_experts, hidden, intermediate)
    x, (ids, weights) = torch.randn(num_tokens, hidden), choices(num_tokens, num_experts, top_k)
    out = moe_experts(x, ids, weights, pack_experts(ExpertWeights(gate_up=gate_up, down=down)))
    assert out.shape == x.shape
    expected = naive_experts(x, ids, weights, gate_up, down)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


QUANTIZERS: dict[str, Callable[[Tensor], Weight]] = {
    "int4": quantize_int4,
    "int4 group 64": lambda weight: quantize_int4(weight, 64),
    "mxfp4": quantize_mxfp4,
    "fp8": quantize_fp8,
    "bf16": lambda weight: weight.bfloat16(),
}


@pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS)
def test_quantised_experts_compute_with_the_dequantised_weights(quantize: Callable[[Tensor], Weight]) -> None:
    torch.manual_seed(0)
    weights = ExpertWeights(gate_up=quantize(torch.randn(4, 128, 192) / 14), down=quantize(torch.randn(4, 192, 64)))
    x, (ids, topk_weights) = torch.randn(7, 192), choices(7, 4, 2)
    out = moe_experts(x, ids, topk_weights, pack_experts(weights))
    expected = naive_experts(x, ids, topk_weights, dequantize(weights.gate_up), dequantize(weights.down))
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_ranks_that_hold_some_experts_add_up() -> None:
    torch.manual_seed(0)
    gate_up, down = torch.randn(6, 32, 16) / 4, torch.randn(6, 16, 16)
    x, (ids, weights) = torch.randn(33, 16), choices(33, 6, 3)
    parts = []
    for first in (0, 2, 4):
        held = slice(first, first + 2)
        packed = pack_experts(ExpertWeights(gate_up=gate_up[held], down=down[held]))
        parts.append(moe_experts(x, ids, weights, packed, first))
        expected = naive_experts(x, ids, weights, gate_up[held], down[held], first)
        torch.testing.assert_close(parts[-1].double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    whole = moe_experts(x, ids, weights, pack_experts(ExpertWeights(gate_up=gate_up, down=down)))
    torch.testing.assert_close(sum(parts), whole, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("first_expert", [0, 2, 100])
def test_choices_held_elsewhere_add_nothing_whatever_the_weights_hold(first_expert: int) -> None:
    packed = pack_experts(ExpertWeights(gate_up=torch.randn(2, 32, 16), down=torch.randn(2, 16, 16)))
    x = torch.randn(5, 16)
    x[0] = torch.nan
    ids = torch.tensor([[-1, 1], [1, 7], [2, 3], [7, -1], [-1, -1]], dtype=torch.int32)
    weights = torch.full((5, 2), torch.nan).masked_fill((ids >= first_expert) & (ids < first_expert + 2), 1.0)
    out = moe_experts(x, ids, weights, packed, first_expert)
    assert not out[1:].isnan().any()
    assert torch.equal(out[4], torch.zeros(16))


def test_an_expert_that_a_token_takes_twice_counts_twice() -> None:
    packed = pack_experts(ExpertWeights(gate_up=torch.randn(2, 32, 16), down=torch.randn(2, 16, 16)))
    x = torch.randn(1, 16)
    twice = moe_experts(x, torch.tensor([[1, 1]]), torch.tensor([[0.5, 0.5]]), packed)
    torch.testing.assert_close(twice, moe_experts(x, torch.tensor([[1]]), torch.tensor([[1.0]]), packed))


def test_experts_are_summed_in_the_order_of_the_choices() -> None:
    """Another order gives other bits with large terms that cancel."""
    down = torch.eye(16).expand(3, 16, 16) * torch.tensor([1e8, 1.0, -1e8])[:, None, None]
    packed = pack_experts(ExpertWeights(gate_up=torch.ones(3, 32, 16), down=down))
    x, ones = torch.ones(1, 16), torch.ones(1, 3)
    in_order = [moe_experts(x, torch.tensor([order]), ones, packed) for order in ([0, 2, 1], [0, 1, 2], [1, 0, 2])]
    alone = moe_experts(x, torch.tensor([[1]]), ones[:, :1], packed)
    assert torch.equal(in_order[0], alone)
    assert not torch.equal(in_order[1], in_order[0])
    company = torch.cat((torch.ones(1, 16), torch.randn(20, 16)))
    ids = torch.tensor([[0, 2, 1]] + [[2, 1, 0]] * 20)
    assert torch.equal(moe_experts(company, ids, torch.ones(21, 3), packed)[:1], in_order[0])


def test_strided_x_and_bf16() -> None:
    packed = pack_experts(ExpertWeights(gate_up=torch.randn(2, 32, 16), down=torch.randn(2, 16, 16)))
    x, (ids, weights) = torch.randn(6, 40)[::2, 10:26].bfloat16(), choices(3, 2, 2)
    expected = moe_experts(x.contiguous().float(), ids, weights, packed)
    assert torch.equal(moe_experts(x, ids, weights, packed), expected.bfloat16())


PACKED = pack_experts(ExpertWeights(gate_up=torch.randn(2, 32, 16), down=torch.randn(2, 16, 16)))
IDS, WEIGHTS = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: moe_experts(torch.randn(3, 15), IDS, WEIGHTS, PACKED),
            r"^x: got shape \[3, 15\], expected \[any, 16\]",
        ),
        (lambda: moe_experts(torch.randn(4, 16), IDS, WEIGHTS, PACKED), r"^topk_ids: .*expected \[4, any\]"),
        (lambda: moe_experts(torch.randn(3, 16), IDS.float(), WEIGHTS, PACKED), "^topk_ids: got torch.float32"),
        (lambda: moe_experts(torch.randn(3, 16), IDS, WEIGHTS[:, :1], PACKED), r"^topk_weights: .*expected \[3, 2\]"),
        (lambda: moe_experts(torch.randn(3, 16), IDS, WEIGHTS.double(), PACKED), "^topk_weights: got torch.float64"),
        (
            lambda: moe_experts(torch.randn(3, 16), IDS, WEIGHTS, dataclasses.replace(PACKED, kind="other")),
            "^experts: got experts packed as 'other'",
        ),
        (
            lambda: pack_experts(ExpertWeights(gate_up=torch.randn(2, 30, 16), down=torch.randn(2, 16, 16))),
            r"^gate_up: got shape \[2, 30, 16\], expected \[2, 32, 16\]",
        ),
        (
            lambda: pack_experts(ExpertWeights(gate_up=torch.randn(32, 16), down=torch.randn(16, 16))),
            r"^down: got shape \[16, 16\]",
        ),
    ],
)
def test_a_wrong_argument_is_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
