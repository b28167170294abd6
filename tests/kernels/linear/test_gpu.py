"""The compiled linear kernels in bf16, against float64 products on the same device."""

import pytest
import torch

from kimi_kernels.linear import kernel, naive
from support.expert_layers import random_weight
from support.row_errors import worst_row_error

pytestmark = pytest.mark.gpu
TOLERANCE = 4e-3


@pytest.mark.parametrize("kind", ["int4", "fp8", "float"])
@pytest.mark.parametrize("num_tokens", [1, 5, 8, 16, 33, 64, 200, 1100])
@pytest.mark.parametrize(("out_features", "in_features"), [(2112, 1536), (300, 96), (20480, 1024)])
def test_products(kind: str, num_tokens: int, out_features: int, in_features: int) -> None:
    torch.manual_seed(num_tokens)
    weight = random_weight(kind, out_features, in_features, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(num_tokens, in_features, device="cuda", dtype=torch.bfloat16)
    packed = kernel.pack_linear(weight)
    expected = naive.linear(x, weight)
    out = kernel.linear(x, packed)
    assert worst_row_error(out, expected) < TOLERANCE
    assert torch.equal(out, kernel.linear(x, packed))


@pytest.mark.parametrize("kind", ["int4", "fp8", "float"])
@pytest.mark.parametrize("num_tokens", [1, 16, 64, 65, 256])
@pytest.mark.parametrize(("out_features", "in_features"), [(300, 96), (65_600, 288)])
def test_logits_keep_what_they_were_summed_in(kind: str, num_tokens: int, out_features: int, in_features: int) -> None:
    torch.manual_seed(num_tokens)
    weight = random_weight(kind, out_features, in_features, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(num_tokens, in_features, device="cuda", dtype=torch.bfloat16)
    packed = kernel.pack_linear(weight)
    logits, expected = kernel.logits(x, packed), naive.linear(x, weight)
    assert logits.dtype == torch.float32
    # Tensor cores scale a quantised weight's steps in bf16 where they do so at all.
    assert worst_row_error(logits, expected) < (1e-5 if kind == "float" else TOLERANCE)
