"""The router, each implementation against its words, row by row."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_kernels.moe_route import naive
from support.implementations import implementations

KIMI = {"top_k": 8, "num_groups": 1, "topk_groups": 1, "renormalize": True, "scaling_factor": 2.827}
DEEPSEEK = {"top_k": 8, "num_groups": 8, "topk_groups": 4, "renormalize": True, "scaling_factor": 2.5}
every_implementation = implementations("moe_route")


def settings(top_k: int, num_groups: int = 1, topk_groups: int = 1, *, renormalize: bool = True) -> dict[str, Any]:
    groups = {"num_groups": num_groups, "topk_groups": topk_groups}
    return KIMI | groups | {"top_k": top_k, "renormalize": renormalize}


def check(ops: ModuleType, logits: Tensor, bias: Tensor, how: dict[str, Any], slots: Tensor | None = None) -> Tensor:
    ids, weights = ops.route_experts(logits, bias, **how, slot_mapping=slots)
    expected_ids, expected = naive.route_experts(logits, bias, **how, slot_mapping=slots)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids, expected_ids)
    tolerance = 1e-6 if "plain" in ops.__name__ else 1e-5  # float64 or float32 inside
    torch.testing.assert_close(weights.double(), expected.double(), rtol=tolerance, atol=tolerance)
    return ids


@every_implementation
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize(
    ("num_experts", "how"),
    [
        (384, KIMI),
        (256, DEEPSEEK),
        (8, KIMI),
        (1, settings(1)),
        (63, settings(8, renormalize=False)),
        (30, settings(3, 3, 2, renormalize=False)),
        (24, settings(6, 4, 1)),
        (24, settings(5, 8, 3)),
        (6, settings(2, 6, 3)),
    ],
)
def test_the_best_experts_are_chosen(ops: ModuleType, num_experts: int, how: dict[str, Any], num_tokens: int) -> None:
    torch.manual_seed(num_experts)
    check(ops, torch.randn(num_tokens, num_experts) * 2, torch.randn(num_experts), how)


@every_implementation
@pytest.mark.parametrize("how", [KIMI, DEEPSEEK], ids=["kimi", "groups"])
def test_among_equals_the_lowest_id_wins(ops: ModuleType, how: dict[str, Any]) -> None:
    assert check(ops, torch.zeros(2, 256), torch.zeros(256), how)[0].tolist() == list(range(8))
    torch.manual_seed(0)
    # Few distinct values: ties within groups and between them.
    check(ops, torch.randint(-1, 2, (6, 256)).float(), torch.zeros(256), how)


@every_implementation
def test_the_bias_chooses_but_does_not_weigh(ops: ModuleType) -> None:
    bias = torch.tensor([0.0, 0.0, 10.0, -10.0])
    ids = check(ops, torch.tensor([[3.0, 1.0, -2.0, 5.0]]), bias, settings(2))
    assert ids.tolist() == [[2, 0]]


@every_implementation
def test_a_closed_group_is_closed_even_when_all_scores_are_negative(ops: ModuleType) -> None:
    logits = torch.tensor([[2.0, 2.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]])
    assert check(ops, logits, torch.full((8,), -5.0), settings(4, 4, 2)).tolist() == [[0, 1, 4, 5]]


@every_implementation
@pytest.mark.parametrize("how", [KIMI, settings(3, 4, 2)], ids=["kimi", "groups"])
def test_padding_takes_no_expert(ops: ModuleType, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits, bias = torch.randn(4, 48), torch.zeros(48)
    ids = check(ops, logits, bias, how, torch.tensor([7, -1, 0, -1]))
    assert (ids[1::2] == -1).all()
    assert torch.equal(ids[::2], check(ops, logits, bias, how, torch.tensor([7, 1, 0, 2]))[::2])


@every_implementation
def test_extreme_logits_and_strides(ops: ModuleType) -> None:
    torch.manual_seed(0)
    check(ops, torch.randn(3, 64) * 60, torch.arange(64) * 1e-3, KIMI)
    check(ops, torch.randn(64, 3).t(), torch.zeros(64), KIMI)
    ids, weights = ops.route_experts(torch.full((1, 4), -1000.0), torch.zeros(4), **settings(2))
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[0.0, 0.0]]


@every_implementation
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"router_logits": torch.randn(2, 8).bfloat16()}, "^router_logits: got torch.bfloat16"),
        ({"router_logits": torch.randn(8)}, r"^router_logits: got shape \[8\]"),
        ({"correction_bias": torch.randn(7)}, r"^correction_bias: got shape \[7\], expected \[8\]"),
        ({"correction_bias": torch.randn(8).double()}, "^correction_bias: got torch.float64"),
        ({"num_groups": 3}, "^num_groups: got 3, expected a divisor of the 8 experts"),
        ({"topk_groups": 5}, "^topk_groups: got 5, expected 1 to num_groups 4"),
        ({"top_k": 5}, "^top_k: got 5, expected 1 to the 4 experts of topk_groups groups"),
        ({"top_k": 0}, "^top_k: got 0"),
        ({"slot_mapping": torch.arange(3)}, r"^slot_mapping: got shape \[3\], expected \[2\]"),
    ],
)
def test_a_wrong_argument_is_named(ops: ModuleType, change: dict[str, Any], message: str) -> None:
    arguments = {"router_logits": torch.randn(2, 8), "correction_bias": torch.randn(8)} | settings(2, 4, 2)
    with pytest.raises(ValueError, match=message):
        ops.route_experts(**(arguments | change))
