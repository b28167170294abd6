"""The linear layers, each implementation against float64 products."""

import dataclasses
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_kernels import half_products
from kimi_kernels.linear import kernel, kernel_dequantize, naive, plain
from kimi_kernels.quantization.plain import quantize_int4
from kimi_kernels.weights import Fp8Weight, Int4Weight, Weight
from support.expert_layers import random_weight
from support.implementations import ROUNDING, implementations
from support.interpreted import INTERPRETED
from support.row_errors import worst_row_error

every_implementation = implementations("linear")
every_format = pytest.mark.parametrize("kind", ["int4", "fp8", "float"])
WORDS, BYTES = torch.zeros(64, 16, dtype=torch.int32), torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
needs_half = pytest.mark.skipif(not half_products.is_available(), reason="this torch has no float16 weights on a CPU")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nothing wrote is not a number: partial products and results that are left out show."""
    empty, new_empty = torch.empty, Tensor.new_empty

    def filled(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan) if tensor.dtype in ROUNDING else tensor

    monkeypatch.setattr(torch, "empty", lambda *shape, **options: filled(empty(*shape, **options)))
    monkeypatch.setattr(Tensor, "new_empty", lambda x, *shape, **options: filled(new_empty(x, *shape, **options)))


def check(ops: ModuleType, x: Tensor, weight: Weight) -> None:
    """Compare a product with its judge, twice: the second call finds scratch as the first left it."""
    packed, expected, before = ops.pack_linear(weight), naive.linear(x, weight), x.clone()
    for _ in range(2):
        out = ops.linear(x, packed)
        assert out.dtype == x.dtype and out.is_contiguous()
        assert worst_row_error(out, expected) < ROUNDING[x.dtype]
    assert torch.equal(x, before)


@every_implementation
@every_format
@pytest.mark.parametrize(
    ("num_tokens", "out_features", "in_features"),
    [(0, 64, 128), (1, 96, 64), (3, 300, 160), (8, 130, 1024), (17, 128, 256), (70, 200, 96)],
    ids=["no rows", "narrow", "odd", "split", "17 rows", "two row tiles"],
)
def test_products(ops: ModuleType, kind: str, num_tokens: int, out_features: int, in_features: int) -> None:
    check(ops, torch.randn(num_tokens, in_features), random_weight(kind, out_features, in_features))


@every_implementation
@pytest.mark.parametrize("num_tokens", [1, 4, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_weights_of_any_width(ops: ModuleType, num_tokens: int, dtype: torch.dtype) -> None:
    for out_features, in_features in ((5, 16), (272, 192), (63, 512), (40, 1100), (16, 63), (1, 1)):
        check(ops, torch.randn(num_tokens, in_features).to(dtype), torch.randn(out_features, in_features).to(dtype))


@every_implementation
def test_half_precision(ops: ModuleType) -> None:
    check(ops, torch.randn(5, 2048).half(), random_weight("int4", 192, 2048))


@every_implementation
@pytest.mark.parametrize("group_size", [64, 128])
def test_larger_groups(ops: ModuleType, group_size: int) -> None:
    check(ops, torch.randn(3, 256), quantize_int4(torch.randn(96, 256), group_size=group_size))


@every_implementation
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_scales_of_either_sign(ops: ModuleType, num_tokens: int) -> None:
    weight = quantize_int4(torch.randn(160, 256))
    signs = torch.randint(0, 2, weight.scales.shape) * 2 - 1
    check(ops, torch.randn(num_tokens, 256), dataclasses.replace(weight, scales=weight.scales * signs))


@every_implementation
@every_format
def test_rows_may_lie_apart_or_be_columns(ops: ModuleType, kind: str) -> None:
    weight, wide = random_weight(kind, 64, 128), torch.full((8, 256), torch.nan)
    wide[::2, 20:148] = torch.randn(4, 128)
    check(ops, wide[::2, 20:148], weight)
    check(ops, torch.randn(128, 4).t(), weight)


@every_implementation
@every_format
@pytest.mark.parametrize(("num_tokens", "out_features", "in_features"), [(3, 300, 160), (8, 130, 1024), (21, 128, 256)])
def test_logits_are_not_rounded_to_the_rows_type(
    ops: ModuleType, kind: str, num_tokens: int, out_features: int, in_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of half-precision rows are as close to the judge as float32 sums; `linear` is what they round to."""
    monkeypatch.setattr(kernel, "DEQUANTIZED_ROWS", 20)
    weight = random_weight(kind, out_features, in_features, dtype=torch.float16)
    x = torch.randn(num_tokens, in_features).half()
    packed, expected = ops.pack_linear(weight), naive.linear(x, weight)
    logits = ops.logits(x, packed)
    assert logits.dtype == torch.float32
    assert worst_row_error(logits, expected) < ROUNDING[torch.float32]
    assert worst_row_error(ops.linear(x, packed), expected) > ROUNDING[torch.float32]
    assert ops.logits(x[:0], packed).dtype == torch.float32


@needs_half
def test_a_weight_is_halved_only_where_that_loses_nothing() -> None:
    weight = torch.randn(24, 64) * 0.05
    for exact in (weight.bfloat16(), weight.half(), quantize_int4(weight)):
        assert plain.pack_linear(exact).kind == plain.HALF_KIND
    for inexact in (weight, weight.bfloat16() * 1e7, torch.full((16, 16), torch.nan)):
        assert plain.pack_linear(inexact).kind == plain.FLOAT_KIND


@needs_half
def test_a_halved_weight_gives_the_float32_product() -> None:
    """Tiny weights too: rounded to float16 alone, most of these would be 0."""
    x, weight = torch.randn(3, 64), (torch.randn(48, 64) * 10.0 ** torch.randint(-9, 1, (48, 64))).bfloat16()
    packed = plain.pack_linear(weight)
    assert packed.kind == plain.HALF_KIND
    torch.testing.assert_close(plain.linear(x, packed).double(), naive.linear(x, weight), rtol=0, atol=1e-5)


def test_without_half_products_weights_stay_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_products, "is_available", lambda: False)
    for in_features, kind in ((64, plain.FLOAT_KIND), (63, plain.TILED_KIND)):
        weight = torch.randn(48, in_features).bfloat16()
        assert plain.pack_linear(weight).kind == kind
        check(plain, torch.randn(3, in_features), weight)


def test_a_plain_weight_is_not_dequantized_for_rows_of_another_type() -> None:
    """Widening a head of gigabytes at every call would go unnoticed."""
    packed = kernel.pack_linear(torch.ones(8, 16, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="dtype"):
        kernel.linear(torch.ones(2, 16), packed)


kernel_alone = pytest.mark.parametrize("ops", [pytest.param(kernel, id="kernel", marks=INTERPRETED)])


@kernel_alone
@pytest.mark.parametrize("kind", ["int4", "fp8"])
@pytest.mark.parametrize(("out_features", "in_features"), [(300, 160), (128, 256), (512, 96)])
def test_many_rows_multiply_a_dequantized_weight(
    ops: ModuleType, kind: str, out_features: int, in_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "DEQUANTIZED_ROWS", 20)
    monkeypatch.setattr(kernel_dequantize, "SLICE_TILES", 2)
    check(ops, torch.randn(21, in_features), random_weight(kind, out_features, in_features))


@kernel_alone
def test_dequantized_weights_are_the_rounded_ones(ops: ModuleType) -> None:
    for kind in ("int4", "fp8"):
        weight, identity = random_weight(kind, 200, 160), torch.eye(160)
        tiles, scales, _ = ops.pack_linear(weight).tensors
        found = kernel_dequantize.dequantized_linear(identity, tiles, scales, kind, 200).T
        assert torch.equal(found, naive.linear(identity, weight).T.float())


@every_implementation
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 20, 70])
@pytest.mark.parametrize(
    ("num_heads", "in_features", "out_features"), [(8, 32, 64), (3, 20, 12), (1, 16, 16), (3, 7, 5), (1, 1, 1)]
)
def test_one_product_a_head(
    ops: ModuleType, num_tokens: int, num_heads: int, in_features: int, out_features: int
) -> None:
    weight = torch.randn(num_heads, in_features, out_features)
    left, right = torch.randn(num_tokens, num_heads, 2 * in_features).chunk(2, dim=2)
    for x in (left.contiguous(), right, left.mT.contiguous().mT):
        out = ops.per_head_linear(x, weight)
        assert out.is_contiguous() and out.dtype == x.dtype
        torch.testing.assert_close(out.double(), naive.per_head_linear(x, weight), rtol=1e-4, atol=1e-5)


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_of_heads_may_be_transposed(ops: ModuleType, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 4, 32).to(dtype), torch.randn(4, 48, 32).mT.to(dtype)
    expected = naive.per_head_linear(x, weight)
    assert worst_row_error(ops.per_head_linear(x, weight), expected) < ROUNDING[dtype]


@every_implementation
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 48)}, r"^x: got shape \[2, 48\], expected \[any, 64\]"),
        ({"x": torch.ones(2, 1, 64)}, r"^x: got shape \[2, 1, 64\]"),
        ({"x": torch.ones(2, 64).int()}, "^x: got torch.int32"),
        ({"kind": "other"}, r"^weight: got a weight packed as 'other', expected one of \['"),
    ],
)
def test_a_wrong_row_or_weight_is_named(ops: ModuleType, change: dict[str, Any], message: str) -> None:
    packed = ops.pack_linear(quantize_int4(torch.ones(16, 64)))
    packed = dataclasses.replace(packed, kind=change.get("kind", packed.kind))
    for op in (ops.linear, ops.logits):
        with pytest.raises(ValueError, match=message):
            op(change.get("x", torch.ones(2, 64)), packed)


@every_implementation
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(4, 5, 6), r"^weight: got shape \[4, 5, 6\]"),
        (torch.ones(4, 5).int(), "^weight: got torch.int32"),
        (Int4Weight(packed=WORDS, scales=torch.ones(64, 3)), r"^scales: .*\[.*64, 4\]"),
        (Fp8Weight(values=BYTES, scales=torch.ones(1, 2)), r"^scales: .*\[.*1, 1\]"),
    ],
)
def test_a_weight_that_cannot_be_packed_is_named(ops: ModuleType, weight: Weight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.pack_linear(weight)


def test_the_kernels_take_groups_and_blocks_of_whole_steps() -> None:
    with pytest.raises(ValueError, match=r"^group_size: got 16, expected a multiple of 32"):
        kernel.pack_linear(Int4Weight(packed=WORDS, scales=torch.ones(64, 8), group_size=16))
    with pytest.raises(ValueError, match=r"^block_size: got 64, expected a multiple of 128"):
        kernel.pack_linear(Fp8Weight(values=BYTES, scales=torch.ones(1, 2), block_size=64))


@every_implementation
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 3, 4)}, r"^x: .*expected \[any, 3, 5\]"),
        ({"x": torch.ones(2, 4, 5)}, r"^x: .*expected \[any, 3, 5\]"),
        ({"x": torch.ones(2, 5)}, r"^x: got shape \[2, 5\]"),
        ({"x": torch.ones(2, 3, 5).int()}, "^x: got torch.int32"),
        ({"weight": torch.ones(3, 5)}, r"^weight: got shape \[3, 5\]"),
        ({"weight": torch.ones(3, 5, 6).int()}, "^weight: got torch.int32"),
    ],
)
def test_a_wrong_row_or_weight_of_heads_is_named(ops: ModuleType, change: dict[str, Tensor], message: str) -> None:
    arguments = {"x": torch.ones(2, 3, 5), "weight": torch.ones(3, 5, 6)} | change
    with pytest.raises(ValueError, match=message):
        ops.per_head_linear(**arguments)
