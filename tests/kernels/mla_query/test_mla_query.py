"""The latent query, each implementation against its words, and the kernel on a card in bf16."""

import pytest
import torch
from torch import Tensor

from kimi_kernels import KernelSet
from kimi_kernels.mla_query import naive
from kimi_kernels.mla_query.kernel import mla_query
from kimi_kernels.mla_query.op import MlaQuery
from support.interpreted import INTERPRETED

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Bounds for values of size one: the products sum in another order; 16-bit results are rounded once."""


def inputs(
    num_tokens: int, heads: int, nope: int, rope: int, latent: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q is cut out of a wider product, as in the layer; positions repeat and jump."""
    generator = torch.Generator().manual_seed(num_tokens)
    wide = torch.randn(num_tokens, heads * (nope + rope) + 24, generator=generator)
    q = wide.to(device, dtype)[:, : heads * (nope + rope)].view(num_tokens, heads, nope + rope)
    w_uk = (torch.randn(heads, nope, latent, generator=generator) * nope**-0.5).to(device, dtype)
    angles = torch.rand(50, rope // 2, generator=generator) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    return q, w_uk, cos_sin, torch.randint(0, 50, (num_tokens,), generator=generator).to(device)


def check(op: MlaQuery, case: tuple[Tensor, Tensor, Tensor, Tensor], interleaved: bool) -> None:
    found = op(*case, interleaved)
    assert found.dtype == case[0].dtype and found.is_contiguous()
    tolerance = TOLERANCES[found.dtype]
    expected = naive.mla_query(*case, interleaved)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize(
    "op",
    [pytest.param(KernelSet.plain().mla_query, id="plain"), pytest.param(mla_query, id="kernel", marks=INTERPRETED)],
)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "heads", "nope", "rope", "latent"),
    [(1, 4, 32, 16, 64), (3, 2, 128, 64, 512), (70, 3, 24, 10, 40), (0, 2, 32, 16, 64), (17, 1, 16, 2, 200)],
)
def test_the_first_part_moves_and_the_second_turns(
    op: MlaQuery,
    num_tokens: int,
    heads: int,
    nope: int,
    rope: int,
    latent: int,
    dtype: torch.dtype,
    interleaved: bool,
) -> None:
    check(op, inputs(num_tokens, heads, nope, rope, latent, dtype), interleaved)


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 63, 64, 256, 300])
def test_on_a_card(num_tokens: int, interleaved: bool) -> None:
    check(mla_query, inputs(num_tokens, 64, 128, 64, 512, torch.bfloat16, "cuda"), interleaved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w_uk": torch.randn(4, 32, 64).half()}, "^w_uk: got torch.float16"),
        ({"w_uk": torch.randn(32, 4, 64).transpose(0, 1)}, "^w_uk: got strides"),
        ({"q": torch.randn(2, 3, 48)}, r"^q: got shape \[2, 3, 48\]"),
        ({"q": torch.randn(2, 4, 49)}, "^q: got 49 columns, expected 32 and an even number more"),
        ({"q": torch.randn(2, 4, 96)[..., ::2]}, "^q: got column stride 2"),
        ({"cos_sin": torch.randn(50, 14)}, "^cos_sin: got shape"),
        ({"positions": torch.arange(3)}, "^positions: got shape"),
    ],
)
def test_a_wrong_argument_of_the_kernel_is_named(change: dict[str, Tensor], message: str) -> None:
    """Those of the plain op are named by the ops that it is made of."""
    names = ("q", "w_uk", "cos_sin", "positions")
    arguments = dict(zip(names, inputs(2, 4, 32, 16, 64, torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        mla_query(**arguments, interleaved=True)
