"""The compiled router, against plain torch on the same device."""

import pytest
import torch

from kimi_kernels.moe_route import kernel, plain

pytestmark = pytest.mark.gpu
ROUNDING = 1e-6
"""float32 sigmoid against float64: scores closer than this may change places."""


@pytest.mark.parametrize(("num_experts", "num_groups", "topk_groups"), [(384, 1, 1), (256, 8, 4)])
@pytest.mark.parametrize("num_tokens", [1, 64, 1000])
def test_against_plain_torch(num_experts: int, num_groups: int, topk_groups: int, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, device="cuda")
    bias = torch.randn(num_experts, device="cuda") * 0.1
    settings = {
        "top_k": 8,
        "num_groups": num_groups,
        "topk_groups": topk_groups,
        "renormalize": True,
        "scaling_factor": 2.827,
    }
    ids, weights = kernel.route_experts(logits, bias, **settings)  # type: ignore[arg-type]
    expected_ids, expected_weights = plain.route_experts(logits, bias, **settings)  # type: ignore[arg-type]
    biased = torch.sigmoid(logits.double()) + bias.double()
    gap = (biased.gather(1, ids.long()) - biased.gather(1, expected_ids.long())).abs()
    # Where two experts tie to rounding, either is right; with groups a tie may even move whole groups, rarely.
    rows = (gap > ROUNDING).any(dim=1)
    assert int(rows.sum()) <= num_tokens // 500
    same = (ids == expected_ids).all(dim=1)
    assert float(same.float().mean()) > 0.99
    torch.testing.assert_close(weights[same], expected_weights[same], rtol=1e-5, atol=1e-6)


def test_equal_scores_take_the_lowest_ids() -> None:
    ids, _ = kernel.route_experts(
        torch.zeros(3, 384, device="cuda"),
        torch.zeros(384, device="cuda"),
        top_k=8,
        num_groups=1,
        topk_groups=1,
        renormalize=True,
        scaling_factor=1.0,
    )
    assert ids.tolist() == [list(range(8))] * 3
