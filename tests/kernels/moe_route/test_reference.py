"""The reference router against the formula written with Python lists."""

import math

import pytest
import torch
from torch import Tensor

from kimi_kernels.moe_route.reference import route_experts

SCALING = 2.827


def naive_route(
    logits: list[float], bias: list[float], top_k: int, num_groups: int, topk_groups: int, renormalize: bool
) -> tuple[list[int], list[float]]:
    scores = [float(torch.tensor(1 / (1 + math.exp(-logit)), dtype=torch.float32)) for logit in logits]
    biased = (torch.tensor(scores, dtype=torch.float32) + torch.tensor(bias, dtype=torch.float32)).tolist()
    size = len(logits) // num_groups
    groups = [sum(sorted(biased[g * size : (g + 1) * size], reverse=True)[:2]) for g in range(num_groups)]
    open_groups = sorted(range(num_groups), key=lambda g: (-groups[g], g))[:topk_groups]
    candidates = [expert for expert in range(len(logits)) if expert // size in open_groups]
    chosen = sorted(candidates, key=lambda expert: (-biased[expert], expert))[:top_k]
    total = sum(scores[expert] for expert in chosen) + 1e-20 if renormalize else 1.0
    return chosen, [scores[expert] / total * SCALING for expert in chosen]


def route(
    logits: Tensor, bias: Tensor, top_k: int, num_groups: int, topk_groups: int, renormalize: bool = True
) -> tuple[Tensor, Tensor]:
    return route_experts(
        logits,
        bias,
        top_k=top_k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        renormalize=renormalize,
        scaling_factor=SCALING,
    )


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "topk_groups"),
    [
        (1, 1, 1, 1),
        (8, 2, 1, 1),
        (63, 8, 1, 1),
        (24, 4, 4, 2),
        (24, 6, 4, 1),
        (24, 5, 8, 3),
        (6, 2, 6, 3),
        (384, 8, 1, 1),
    ],
)
def test_route(num_experts: int, top_k: int, num_groups: int, topk_groups: int, renormalize: bool) -> None:
    torch.manual_seed(num_experts)
    logits, bias = torch.randn(65, num_experts) * 2, torch.randn(num_experts)
    ids, weights = route(logits, bias, top_k, num_groups, topk_groups, renormalize)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    for row in range(65):
        expected_ids, expected = naive_route(
            logits[row].tolist(), bias.tolist(), top_k, num_groups, topk_groups, renormalize
        )
        assert ids[row].tolist() == expected_ids
        assert weights[row].tolist() == pytest.approx(expected, rel=1e-6)


def test_among_equals_the_lowest_id_wins() -> None:
    ids, weights = route(torch.zeros(2, 12), torch.zeros(12), 4, 3, 2)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [pytest.approx([SCALING / 4] * 4, rel=1e-6)] * 2


def test_the_bias_chooses_but_does_not_weigh() -> None:
    bias = torch.tensor([0.0, 0.0, 10.0, -10.0])
    ids, weights = route(torch.tensor([[3.0, 1.0, -2.0, 5.0]]), bias, 2, 1, 1)
    assert ids.tolist() == [[2, 0]]
    scores = torch.tensor([-2.0, 3.0], dtype=torch.float64).sigmoid()
    assert weights[0].tolist() == pytest.approx((scores / scores.sum() * SCALING).tolist(), rel=1e-6)


def test_a_closed_group_is_closed_even_when_all_scores_are_negative() -> None:
    bias = torch.full((8,), -5.0)
    ids, _ = route(torch.tensor([[2.0, 2.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]]), bias, 4, 4, 2)
    assert ids.tolist() == [[0, 1, 4, 5]]


def test_scores_too_small_to_sum_do_not_divide_by_zero() -> None:
    ids, weights = route(torch.full((1, 4), -1000.0), torch.zeros(4), 2, 1, 1)
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.0, 0.0]]


def test_no_rows() -> None:
    ids, weights = route(torch.randn(0, 8), torch.randn(8), 2, 2, 1)
    assert ids.shape == weights.shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.randn(2, 8).bfloat16()}, "^router_logits: got torch.bfloat16, expected torch.float32"),
        ({"logits": torch.randn(8)}, r"^router_logits: got shape \[8\]"),
        ({"bias": torch.randn(7)}, r"^correction_bias: got shape \[7\], expected \[8\]"),
        ({"bias": torch.randn(8).double()}, "^correction_bias: got torch.float64"),
        ({"num_groups": 3}, "^num_groups: got 3, expected a divisor of the 8 experts"),
        ({"topk_groups": 5}, "^topk_groups: got 5, expected 1 to num_groups 4"),
        ({"top_k": 5}, "^top_k: got 5, expected 1 to the 4 experts of topk_groups groups"),
        ({"top_k": 0}, "^top_k: got 0"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], message: str) -> None:
    arguments = {"logits": torch.randn(2, 8), "bias": torch.randn(8), "top_k": 2, "num_groups": 4, "topk_groups": 2}
    with pytest.raises(ValueError, match=message):
        route(**(arguments | change))
