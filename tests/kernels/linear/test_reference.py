"""The reference linear layers against float64 products."""

import dataclasses

import pytest
import torch
from torch import Tensor

from kimi_kernels.linear.reference import linear, pack_linear, per_head_linear
from kimi_kernels.quantization.reference import dequantize, quantize_fp8, quantize_int4
from kimi_kernels.weights import PackedWeight, Weight

# float32 products of standard normals: sums of up to 300 terms, each within 2^-24 of its partial sum.
TOLERANCE = 1e-4


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 16, 63, 65])
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (3, 63), (65, 16), (64, 48), (300, 7)])
def test_linear_is_the_product(num_tokens: int, in_features: int, out_features: int) -> None:
    torch.manual_seed(num_tokens)
    x, weight = torch.randn(num_tokens, in_features), torch.randn(out_features, in_features)
    out = linear(x, pack_linear(weight))
    assert out.shape == (num_tokens, out_features)
    assert out.dtype == torch.float32
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=TOLERANCE, atol=TOLERANCE)


def test_linear_computes_in_float32_whatever_the_dtypes() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    out = linear(x, pack_linear(weight))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, (x.double() @ weight.double().t()).bfloat16())


@pytest.mark.parametrize(
    "weight",
    [quantize_int4(torch.randn(24, 64)), quantize_fp8(torch.randn(200, 130)), torch.randn(24, 40)],
    ids=["int4", "fp8", "plain"],
)
def test_linear_takes_quantised_weights(weight: Weight) -> None:
    plain = dequantize(weight)
    x = torch.randn(3, plain.shape[1])
    torch.testing.assert_close(linear(x, pack_linear(weight)), x @ plain.t(), rtol=TOLERANCE, atol=TOLERANCE)


def test_linear_takes_strided_rows() -> None:
    torch.manual_seed(0)
    wide, weight = torch.randn(32, 100), pack_linear(torch.randn(16, 64))
    strided = wide[::2, 20:84]
    assert torch.equal(linear(strided, weight), linear(strided.contiguous(), weight))


def test_packing_float32_does_not_copy_and_never_changes_the_weight() -> None:
    weight = torch.randn(32, 64)
    before = weight.clone()
    packed = pack_linear(weight)
    linear(torch.randn(3, 64), packed)
    assert packed.tensors[0].data_ptr() == weight.data_ptr()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 16, 63, 65])
@pytest.mark.parametrize(("num_heads", "in_features", "out_features"), [(1, 1, 1), (4, 16, 32), (3, 63, 5)])
def test_per_head_linear_is_a_product_a_head(
    num_tokens: int, num_heads: int, in_features: int, out_features: int
) -> None:
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, num_heads, in_features)
    weight = torch.randn(num_heads, in_features, out_features)
    out = per_head_linear(x, weight)
    expected = torch.stack([x[:, head].double() @ weight[head].double() for head in range(num_heads)], dim=1)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_per_head_linear_takes_strided_arguments() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 4, 48)[..., 16:], torch.randn(4, 24, 32).transpose(1, 2)
    assert torch.equal(per_head_linear(x, weight), per_head_linear(x.contiguous(), weight.contiguous()))


def packed_elsewhere(weight: Tensor) -> PackedWeight:
    return dataclasses.replace(pack_linear(weight), kind="other")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: linear(torch.randn(2, 3), pack_linear(torch.randn(4, 5))),
            r"^x: got shape \[2, 3\], expected \[any, 5\]",
        ),
        (lambda: linear(torch.ones(2, 5, dtype=torch.int64), pack_linear(torch.randn(4, 5))), "^x: got torch.int64"),
        (
            lambda: linear(torch.randn(2, 5), packed_elsewhere(torch.randn(4, 5))),
            "^weight: got a weight packed as 'other'",
        ),
        (lambda: pack_linear(torch.randn(4, 5, 6)), r"^weight: got shape \[4, 5, 6\]"),
        (lambda: pack_linear(torch.ones(4, 5, dtype=torch.int32)), "^weight: got torch.int32"),
        (lambda: per_head_linear(torch.randn(2, 3, 4), torch.randn(3, 5, 6)), r"^x: .*expected \[any, 3, 5\]"),
        (lambda: per_head_linear(torch.randn(2, 4), torch.randn(3, 5)), r"^weight: got shape \[3, 5\]"),
    ],
)
def test_a_wrong_argument_is_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
