"""The Triton-language router in the interpreter, against the reference."""

from collections.abc import Mapping

import pytest
import torch

from kimi_kernels.moe_route import kernel, reference
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED
TOLERANCE = 1e-5
"""float32 sigmoid and sum against float64."""

KIMI = {"top_k": 8, "num_groups": 1, "topk_groups": 1, "renormalize": True, "scaling_factor": 2.827}
DEEPSEEK = {"top_k": 8, "num_groups": 8, "topk_groups": 4, "renormalize": True, "scaling_factor": 2.5}
PLAIN = {"top_k": 3, "num_groups": 3, "topk_groups": 2, "renormalize": False, "scaling_factor": 1.0}


def check(logits: torch.Tensor, bias: torch.Tensor, settings: Mapping[str, object]) -> torch.Tensor:
    ids, weights = kernel.route_experts(logits, bias, **settings)  # type: ignore[arg-type]
    expected_ids, expected_weights = reference.route_experts(logits, bias, **settings)  # type: ignore[arg-type]
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=TOLERANCE, atol=TOLERANCE)
    return ids


@pytest.mark.parametrize(
    ("num_experts", "settings"),
    [(384, KIMI), (256, DEEPSEEK), (30, PLAIN), (8, KIMI)],
    ids=["kimi", "groups", "odd groups", "all"],
)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_random_logits(num_experts: int, settings: Mapping[str, object], num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    check(torch.randn(num_tokens, num_experts), torch.randn(num_experts) * 0.1, settings)


@pytest.mark.parametrize("settings", [KIMI, DEEPSEEK], ids=["kimi", "groups"])
def test_equal_scores_take_the_lowest_ids(settings: Mapping[str, object]) -> None:
    ids = check(torch.zeros(2, 256), torch.zeros(256), settings)
    assert ids[0].tolist() == list(range(8))
    torch.manual_seed(0)
    # Few distinct values: ties within groups and between them.
    check(torch.randint(-1, 2, (6, 256)).float(), torch.zeros(256), settings)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    torch.manual_seed(0)
    logits, bias = torch.randn(3, 48), torch.zeros(48)
    bias[40:] = 5
    ids = check(logits, bias, KIMI)
    assert sorted(ids[0].tolist()) == list(range(40, 48))


def test_padding_takes_no_expert() -> None:
    torch.manual_seed(0)
    logits, bias = torch.randn(4, 48), torch.zeros(48)
    slots = torch.tensor([7, -1, 0, -1])
    ids, _ = kernel.route_experts(logits, bias, **KIMI, slot_mapping=slots)  # type: ignore[arg-type]
    expected, _ = reference.route_experts(logits, bias, **KIMI, slot_mapping=slots)  # type: ignore[arg-type]
    plain, _ = reference.route_experts(logits, bias, **KIMI)  # type: ignore[arg-type]
    assert torch.equal(ids, expected)
    assert (ids[1::2] == -1).all()
    assert torch.equal(ids[::2], plain[::2])


def test_groups_of_one_expert() -> None:
    torch.manual_seed(0)
    settings = {"top_k": 2, "num_groups": 6, "topk_groups": 3, "renormalize": True, "scaling_factor": 1.0}
    check(torch.randn(4, 6), torch.randn(6), settings)


def test_extreme_logits_and_strides() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 64) * 60
    check(logits, torch.zeros(64) + torch.arange(64) * 1e-3, KIMI)
    check(torch.randn(64, 3).t(), torch.zeros(64), KIMI)


def test_no_tokens() -> None:
    ids, weights = kernel.route_experts(torch.empty(0, 16), torch.zeros(16), **KIMI)  # type: ignore[arg-type]
    assert ids.shape == weights.shape == (0, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_groups": 7}, "num_groups: got 7, expected a divisor of the 384 experts"),
        ({"topk_groups": 2}, "topk_groups: got 2, expected 1 to num_groups 1"),
        ({"top_k": 385}, "top_k: got 385, expected 1 to the 384 experts"),
    ],
)
def test_wrong_settings_are_refused(change: Mapping[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernel.route_experts(torch.zeros(1, 384), torch.zeros(384), **(KIMI | dict(change)))  # type: ignore[arg-type]
