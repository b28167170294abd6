"""Sums of choices in the interpreter, by the kernels that add them, against plain torch."""

import pytest
import torch

from kimi_kernels.choice_products import ChoiceProducts, plain_sum
from kimi_kernels.moe_experts.kernel_sum import sum_terms
from kimi_kernels.rms_norm import kernel as norm
from kimi_kernels.rms_norm import plain as plain_norm
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED


def test_sums_of_choices_wherever_they_are_added() -> None:
    torch.manual_seed(0)
    terms = ChoiceProducts(
        products=torch.randn(15, 300).half(),
        topk_ids=torch.tensor([[4, 5, 6], [7, 9, 3], [-1, -1, -1], [5, 5, 8], [0, 1, 2]], dtype=torch.int32),
        topk_weights=torch.rand(5, 3),
        first_expert=3,
        num_experts=5,
    )
    terms.products[[4, 6, 7, 8, 11, 12, 13, 14]] = torch.nan  # of experts held elsewhere
    second, residual, weight = torch.randn(5, 300).half(), torch.randn(5, 300), torch.rand(300)
    for more in (None, second):
        expected = plain_sum(terms, more)
        assert not expected.isnan().any()
        torch.testing.assert_close(sum_terms(terms, more), expected)
        for found, want in zip(
            norm.add_rms_norm(terms, residual, weight, 1e-5, more),
            plain_norm.add_rms_norm(expected, residual, weight, 1e-5),
            strict=True,
        ):
            torch.testing.assert_close(found, want, rtol=2e-3, atol=2e-3)
    assert (plain_sum(terms)[[2, 4]] == 0).all(), "padding, and a token whose experts are all elsewhere"
    with pytest.raises(ValueError, match="second: got shape"):
        sum_terms(terms, second[:2])
