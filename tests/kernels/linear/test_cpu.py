"""The CPU kernel set's linear layers against float64 products."""

import dataclasses

import pytest
import torch

from kimi_kernels import half_products
from kimi_kernels.linear import reference
from kimi_kernels.linear.cpu import FLOAT_KIND, HALF_KIND, linear, pack_linear, per_head_linear
from kimi_kernels.quantization.reference import dequantize, quantize_fp8, quantize_int4
from kimi_kernels.weights import Weight

# float32 products of standard normals: sums of up to 512 terms, each within 2^-24 of its partial sum.
TOLERANCE = 1e-4


SIZES = [(16, 1), (192, 272), (96, 12), (512, 63), (1100, 40), (63, 16), (1, 1)]
needs_half = pytest.mark.skipif(not half_products.is_available(), reason="this torch has no float16 weights on a CPU")


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4, 17, 65])
@pytest.mark.parametrize(("in_features", "out_features"), SIZES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_linear_is_the_product(num_tokens: int, in_features: int, out_features: int, weight_dtype: torch.dtype) -> None:
    torch.manual_seed(num_tokens)
    x, weight = torch.randn(num_tokens, in_features), torch.randn(out_features, in_features).to(weight_dtype)
    out = linear(x, pack_linear(weight))
    assert out.shape == (num_tokens, out_features)
    assert out.dtype == torch.float32
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=TOLERANCE, atol=TOLERANCE)


@needs_half
def test_a_weight_is_halved_only_where_that_loses_nothing() -> None:
    weight = torch.randn(24, 64) * 0.05
    int4 = quantize_int4(weight)
    int4 = dataclasses.replace(int4, scales=int4.scales.bfloat16())
    for exact in (weight.bfloat16(), weight.half(), int4):
        assert pack_linear(exact).kind == HALF_KIND
    for inexact in (weight, weight.bfloat16() * 1e7, torch.full((16, 16), torch.nan)):
        assert pack_linear(inexact).kind == FLOAT_KIND


@needs_half
def test_a_halved_weight_gives_the_float32_product() -> None:
    """Tiny weights too: rounded to float16 alone, most of these would be 0."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 64), (torch.randn(48, 64) * 10.0 ** torch.randint(-9, 1, (48, 64))).bfloat16()
    packed = pack_linear(weight)
    assert packed.kind == HALF_KIND
    torch.testing.assert_close(linear(x, packed), x @ weight.float().t(), rtol=0, atol=1e-5)


def test_without_half_products_weights_stay_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_products, "is_available", lambda: False)
    x, weight = torch.randn(3, 64), torch.randn(48, 64).bfloat16()
    packed = pack_linear(weight)
    assert packed.kind == FLOAT_KIND
    torch.testing.assert_close(linear(x, packed), x @ weight.float().t(), rtol=TOLERANCE, atol=TOLERANCE)
    assert pack_linear(torch.randn(48, 63)).kind == reference.PACKED_KIND


@pytest.mark.parametrize(
    "weight",
    [quantize_int4(torch.randn(24, 64)), quantize_fp8(torch.randn(200, 144)), torch.randn(24, 48)],
    ids=["int4", "fp8", "plain"],
)
def test_linear_takes_quantised_weights(weight: Weight) -> None:
    plain = dequantize(weight)
    x = torch.randn(3, plain.shape[1])
    torch.testing.assert_close(linear(x, pack_linear(weight)), x @ plain.t(), rtol=TOLERANCE, atol=TOLERANCE)


def test_linear_takes_strided_rows_and_bf16() -> None:
    torch.manual_seed(0)
    wide, weight = torch.randn(8, 100), torch.randn(16, 64)
    packed = pack_linear(weight)
    strided = wide[::2, 20:84]
    assert torch.equal(linear(strided, packed), linear(strided.contiguous(), packed))
    rounded = linear(strided.bfloat16(), packed)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, linear(strided.bfloat16().float(), packed).bfloat16())


def test_a_wrong_width_or_another_sets_weight_is_refused() -> None:
    packed = pack_linear(torch.randn(16, 32))
    with pytest.raises(ValueError, match=r"x: got shape \[2, 48\], expected \[any, 32\]"):
        linear(torch.randn(2, 48), packed)
    with pytest.raises(ValueError, match=r"packed as 'triton\.bf16'"):
        linear(torch.randn(2, 32), dataclasses.replace(packed, kind="triton.bf16"))
    with pytest.raises(ValueError, match=r"packed as 'cpu\.float32'"):
        reference.linear(torch.randn(2, 32), packed)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5, 33])
@pytest.mark.parametrize(("num_heads", "in_features", "out_features"), [(8, 32, 64), (1, 16, 16), (3, 7, 5)])
def test_per_head_linear_is_one_product_a_head(
    num_tokens: int, num_heads: int, in_features: int, out_features: int
) -> None:
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, num_heads, in_features + 9)[..., :in_features]
    weight = torch.randn(num_heads, in_features, out_features)
    expected = torch.einsum("tni,nio->tno", x.double(), weight.double())
    torch.testing.assert_close(per_head_linear(x, weight).double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_per_head_linear_refuses_another_number_of_heads() -> None:
    with pytest.raises(ValueError, match=r"x: got shape \[2, 3, 16\]"):
        per_head_linear(torch.randn(2, 3, 16), torch.randn(4, 16, 16))
