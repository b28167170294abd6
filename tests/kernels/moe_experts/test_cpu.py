"""The CPU kernel set's experts against the reference's."""

import dataclasses

import pytest
import torch

from kimi_kernels.moe_experts import reference
from kimi_kernels.moe_experts.cpu import FEW_TOKENS, PACKED_KIND, moe_experts, pack_experts
from support.expert_layers import expected_experts, random_choices, random_experts, relative_error

# float32 sums of up to 192 terms, twice, in another order.
TOLERANCE = 2e-6


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4, FEW_TOKENS, FEW_TOKENS + 1, 130])
@pytest.mark.parametrize(
    ("kind", "hidden", "intermediate", "is_fast"),
    [("plain", 192, 128, True), ("int4", 64, 32, True), ("plain", 48, 16, True), ("plain", 63, 20, False)],
)
@pytest.mark.parametrize("first_expert", [0, 2, 100])
def test_it_equals_the_reference(
    num_tokens: int, kind: str, hidden: int, intermediate: int, is_fast: bool, first_expert: int
) -> None:
    """Twelve experts to choose from, ten of which are held here, or none. Some rows are padding and choose none."""
    torch.manual_seed(num_tokens)
    weights = random_experts(kind, 10, hidden, intermediate)
    experts = pack_experts(weights)
    assert (experts.kind == PACKED_KIND) == is_fast
    x = torch.randn(num_tokens, hidden)
    ids, scale = random_choices(num_tokens, 12, 3)
    ids[3::5] = -1
    got = moe_experts(x, ids, scale, experts, first_expert)
    expected = expected_experts(x, ids, scale, reference.pack_experts(weights), first_expert)
    assert got.shape == expected.shape
    assert relative_error(got, expected) < TOLERANCE
    assert (got[3::5] == 0).all()


def test_experts_that_nobody_chose_are_not_read() -> None:
    weights = random_experts("plain", 6, 64, 32)
    assert isinstance(weights.gate_up, torch.Tensor)
    weights.gate_up[2:] = torch.nan
    for num_tokens in (2, FEW_TOKENS + 4):
        ids = torch.tensor([[0, 1]] * num_tokens, dtype=torch.int32)
        assert (
            moe_experts(torch.randn(num_tokens, 64), ids, torch.ones(num_tokens, 2), pack_experts(weights))
            .isfinite()
            .all()
        )


def test_bf16_rows_are_rounded_once() -> None:
    experts = pack_experts(random_experts("plain", 4, 64, 32))
    x = torch.randn(3, 64).bfloat16()
    ids, scale = random_choices(3, 4, 2)
    assert torch.equal(moe_experts(x, ids, scale, experts), moe_experts(x.float(), ids, scale, experts).bfloat16())


def test_what_does_not_fit_is_refused() -> None:
    experts = pack_experts(random_experts("plain", 4, 64, 32))
    ids, scale = random_choices(3, 4, 2)
    with pytest.raises(ValueError, match="x: got shape"):
        moe_experts(torch.randn(3, 48), ids, scale, experts)
    with pytest.raises(ValueError, match="topk_weights: got shape"):
        moe_experts(torch.randn(3, 64), ids, scale[:, :1], experts)
    with pytest.raises(ValueError, match="topk_ids: got shape"):
        moe_experts(torch.randn(2, 64), ids, scale, experts)
    with pytest.raises(ValueError, match="packed as 'triton'"):
        moe_experts(torch.randn(3, 64), ids, scale, dataclasses.replace(experts, kind="triton"))
