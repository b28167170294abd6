"""The CPU kernel set's experts against the reference's."""

import dataclasses

import pytest
import torch
from kimi_kernels.linear.plain import FLOAT_KIND, HALF_KIND

from kimi_kernels.half_products import is_available
from kimi_kernels.moe_experts import reference
from kimi_kernels.moe_experts.cpu import moe_experts, pack_experts
from support.expert_layers import expected_experts, random_choices, random_experts
from support.row_errors import worst_row_error

# float32 sums of up to 192 terms, twice, in another order.
TOLERANCE = 2e-6


HALF = HALF_KIND if is_available() else FLOAT_KIND


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4, 17, 130])
@pytest.mark.parametrize(
    ("dtype", "hidden", "intermediate", "kind"),
    [
        (torch.float32, 192, 128, FLOAT_KIND),
        (torch.float32, 48, 16, FLOAT_KIND),
        (torch.float32, 63, 20, reference.PACKED_KIND),
        (torch.bfloat16, 192, 128, HALF),
    ],
)
@pytest.mark.parametrize("first_expert", [0, 2, 100])
def test_it_equals_the_reference(
    num_tokens: int, dtype: torch.dtype, hidden: int, intermediate: int, kind: str, first_expert: int
) -> None:
    """Twelve experts to choose from, ten of which are held here, or none. Some rows are padding and choose none."""
    torch.manual_seed(num_tokens)
    weights = random_experts("plain", 10, hidden, intermediate, dtype=dtype)
    experts = pack_experts(weights)
    assert experts.kind == kind
    x = torch.randn(num_tokens, hidden)
    ids, scale = random_choices(num_tokens, 12, 3)
    ids[3::5] = -1
    before = x.clone(), ids.clone(), scale.clone()
    got = moe_experts(x, ids, scale, experts, first_expert)
    expected = expected_experts(x, ids, scale, reference.pack_experts(weights), first_expert)
    assert got.shape == expected.shape
    assert got.is_contiguous()
    assert worst_row_error(got, expected) < TOLERANCE
    assert (got[3::5] == 0).all()
    assert all(map(torch.equal, before, (x, ids, scale)))


@pytest.mark.parametrize("kind", ["int4", "mxfp4", "fp8"])
def test_quantised_experts_equal_the_reference(kind: str) -> None:
    torch.manual_seed(0)
    weights = random_experts(kind, 6, 128, 128)
    x, (ids, scale) = torch.randn(5, 128), random_choices(5, 6, 2)
    expected = expected_experts(x, ids, scale, reference.pack_experts(weights))
    assert worst_row_error(moe_experts(x, ids, scale, pack_experts(weights)), expected) < TOLERANCE


def test_experts_that_nobody_chose_are_not_read() -> None:
    weights = random_experts("plain", 6, 64, 32)
    assert isinstance(weights.gate_up, torch.Tensor)
    weights.gate_up[2:] = torch.nan
    for num_tokens in (1, 20):
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
