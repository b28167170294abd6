"""The fused query kernel against the ops that it fuses: in the interpreter, and marked `gpu` on a card in bf16."""

import pytest
import torch

from kimi_kernels import KernelSet
from kimi_kernels.mla_query.kernel import mla_query
from support.interpreted import INTERPRETED

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Bounds for values of size one: the products sum in another order; 16-bit results are rounded once."""


def inputs(
    num_tokens: int, heads: int, nope: int, rope: int, latent: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q is cut out of a wider product, as in the layer; positions repeat and jump."""
    generator = torch.Generator().manual_seed(num_tokens)
    wide = torch.randn(num_tokens, heads * (nope + rope) + 24, generator=generator)
    q = wide.to(device, dtype)[:, : heads * (nope + rope)].view(num_tokens, heads, nope + rope)
    w_uk = (torch.randn(heads, nope, latent, generator=generator) * nope**-0.5).to(device, dtype)
    angles = torch.rand(50, rope // 2, generator=generator) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    return q, w_uk, cos_sin, torch.randint(0, 50, (num_tokens,), generator=generator).to(device)


def check(case: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], interleaved: bool) -> None:
    q, w_uk, cos_sin, positions = case
    expected = KernelSet.reference().mla_query(q, w_uk, cos_sin, positions, interleaved)
    found = mla_query(q, w_uk, cos_sin, positions, interleaved)
    assert found.dtype == q.dtype and found.is_contiguous()
    tolerance = TOLERANCES[q.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "heads", "nope", "rope", "latent"),
    [(1, 4, 32, 16, 64), (3, 2, 128, 64, 512), (70, 3, 24, 10, 40), (0, 2, 32, 16, 64), (17, 1, 16, 2, 200)],
)
class TestInterpreted:
    pytestmark = INTERPRETED

    def test_it_equals_the_ops_it_fuses(
        self, num_tokens: int, heads: int, nope: int, rope: int, latent: int, dtype: torch.dtype, interleaved: bool
    ) -> None:
        check(inputs(num_tokens, heads, nope, rope, latent, dtype), interleaved)


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 63, 64, 256, 300])
def test_it_equals_the_ops_it_fuses_on_a_card(num_tokens: int, interleaved: bool) -> None:
    check(inputs(num_tokens, 64, 128, 64, 512, torch.bfloat16, "cuda"), interleaved)


def test_a_weight_that_does_not_fit_is_named() -> None:
    q, w_uk, cos_sin, positions = inputs(2, 4, 32, 16, 64, torch.float32)
    with pytest.raises(ValueError, match="w_uk"):
        mla_query(q, w_uk.half(), cos_sin, positions, True)
    with pytest.raises(ValueError, match="q: got shape"):
        mla_query(q[:, :3], w_uk, cos_sin, positions, True)
    with pytest.raises(ValueError, match="cos_sin"):
        mla_query(q, w_uk, cos_sin[:, :14], positions, True)
