"""The Triton-language linear layers in the interpreter, against the reference."""

import pytest
import torch

from kimi_kernels.linear import kernel, kernel_dequantize, reference
from kimi_kernels.quantization.reference import dequantize, quantize_int4
from kimi_kernels.weights import Fp8Weight, Int4Weight
from support.expert_layers import random_weight
from support.interpreted import INTERPRETED
from support.row_errors import worst_row_error

pytestmark = INTERPRETED
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nothing wrote is not a number: partial products and results that a kernel leaves out show."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(torch.nan) if tensor.dtype in TOLERANCE else tensor

    monkeypatch.setattr(torch, "empty", lambda *shape, **options: filled(empty(*shape, **options)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape, **options: filled(new_empty(x, *shape, **options)))


def check(kind: str, num_tokens: int, out_features: int, in_features: int, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(num_tokens)
    weight, x = random_weight(kind, out_features, in_features), torch.randn(num_tokens, in_features).to(dtype)
    packed = kernel.pack_linear(weight)
    expected = reference.linear(x.float(), reference.pack_linear(weight))
    for _ in range(2):  # the second call finds the scratch as the first left it
        out = kernel.linear(x, packed)
        assert out.dtype == dtype and out.shape == (num_tokens, out_features)
        assert worst_row_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["int4", "fp8", "float"])
@pytest.mark.parametrize(
    ("num_tokens", "out_features", "in_features"),
    [(1, 96, 64), (3, 300, 160), (8, 130, 1024), (17, 128, 256), (70, 200, 96)],
    ids=["narrow", "odd", "split", "17 rows", "two row tiles"],
)
def test_shapes(kind: str, num_tokens: int, out_features: int, in_features: int) -> None:
    check(kind, num_tokens, out_features, in_features)


@pytest.mark.parametrize("kind", ["int4", "fp8", "float"])
@pytest.mark.parametrize(("num_tokens", "out_features", "in_features"), [(3, 300, 160), (8, 130, 1024), (21, 128, 256)])
def test_logits_are_not_rounded_to_the_rows_type(
    kind: str, num_tokens: int, out_features: int, in_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of half-precision rows are as close to the reference as float32 sums; `linear` is what they round to."""
    monkeypatch.setattr(kernel, "DEQUANTIZED_ROWS", 20)
    torch.manual_seed(num_tokens)
    weight = random_weight(kind, out_features, in_features)
    x = torch.randn(num_tokens, in_features).half()
    packed = kernel.pack_linear(weight.half() if isinstance(weight, torch.Tensor) else weight)
    kept = reference.pack_linear(weight.half().float() if isinstance(weight, torch.Tensor) else weight)
    logits, expected = kernel.logits(x, packed), reference.linear(x.float(), kept)
    assert logits.dtype == torch.float32
    assert worst_row_error(logits, expected) < 1e-5 < worst_row_error(kernel.linear(x, packed), expected)
    assert kernel.logits(x[:0], packed).dtype == torch.float32


def test_a_plain_weight_is_not_dequantized_for_rows_of_another_type() -> None:
    """Widening a head of gigabytes at every call would go unnoticed."""
    packed = kernel.pack_linear(torch.ones(8, 16, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="dtype"):
        kernel.linear(torch.ones(2, 16), packed)


@pytest.mark.parametrize("kind", ["int4", "fp8"])
@pytest.mark.parametrize(("out_features", "in_features"), [(300, 160), (128, 256), (512, 96)])
def test_many_rows_multiply_a_dequantized_weight(
    kind: str, out_features: int, in_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "DEQUANTIZED_ROWS", 20)
    monkeypatch.setattr(kernel_dequantize, "SLICE_TILES", 2)
    check(kind, 21, out_features, in_features)


def test_dequantized_weights_are_the_rounded_ones() -> None:
    for kind in ("int4", "fp8"):
        weight, identity = random_weight(kind, 200, 160), torch.eye(160)
        tiles, scales, _ = kernel.pack_linear(weight).tensors
        assert torch.equal(
            kernel_dequantize.dequantized_linear(identity, tiles, scales, kind, 200).T, dequantize(weight)
        )


def test_half_precision() -> None:
    check("int4", 5, 192, 2048, torch.float16)


@pytest.mark.parametrize("group_size", [64, 128])
def test_larger_groups(group_size: int) -> None:
    torch.manual_seed(0)
    plain = torch.randn(96, 256)
    weight = quantize_int4(plain, group_size=group_size)
    x = torch.randn(3, 256)
    expected = reference.linear(x, reference.pack_linear(weight))
    assert worst_row_error(kernel.linear(x, kernel.pack_linear(weight)), expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_scales_of_either_sign(num_tokens: int) -> None:
    torch.manual_seed(0)
    plain = quantize_int4(torch.randn(160, 256))
    signs = torch.randint(0, 2, plain.scales.shape) * 2 - 1
    weight = Int4Weight(packed=plain.packed, scales=plain.scales * signs)
    x = torch.randn(num_tokens, 256)
    expected = reference.linear(x, reference.pack_linear(weight))
    assert worst_row_error(kernel.linear(x, kernel.pack_linear(weight)), expected) < TOLERANCE[torch.float32]


def test_strided_and_transposed_rows() -> None:
    torch.manual_seed(0)
    weight = random_weight("int4", 64, 128)
    packed, expected_weight = kernel.pack_linear(weight), reference.pack_linear(weight)
    for x in (torch.randn(4, 256)[:, :128], torch.randn(128, 4).t()):
        expected = reference.linear(x.contiguous(), expected_weight)
        assert worst_row_error(kernel.linear(x, packed), expected) < TOLERANCE[torch.float32]


def test_no_rows() -> None:
    packed = kernel.pack_linear(random_weight("fp8", 64, 128))
    assert kernel.linear(torch.empty(0, 128), packed).shape == (0, 64)


def test_wrong_arguments_are_refused() -> None:
    weight = random_weight("int4", 64, 128)
    assert isinstance(weight, Int4Weight)
    packed = kernel.pack_linear(weight)
    with pytest.raises(ValueError, match="x: got shape"):
        kernel.linear(torch.empty(2, 64), packed)
    with pytest.raises(ValueError, match=r"weight: got a weight packed as 'reference\.float32'"):
        kernel.linear(torch.empty(2, 128), reference.pack_linear(weight))
    with pytest.raises(ValueError, match="group_size: got 16, expected a multiple of 32"):
        kernel.pack_linear(Int4Weight(packed=weight.packed, scales=torch.ones(64, 8), group_size=16))
    values = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="block_size: got 64, expected a multiple of 128"):
        kernel.pack_linear(Fp8Weight(values=values, scales=torch.ones(1, 2), block_size=64))


def test_per_head_linear() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 20, 12)
    rows = torch.randn(5, 3, 20), torch.randn(5, 3, 40)[..., :20], torch.randn(3, 5, 20).transpose(0, 1)
    for x in (*rows, torch.randn(20, 3, 20), torch.randn(70, 3, 20)):
        out = kernel.per_head_linear(x, weight)
        torch.testing.assert_close(out, reference.per_head_linear(x, weight))
        assert out.is_contiguous()
    assert kernel.per_head_linear(torch.empty(0, 3, 20), weight).shape == (0, 3, 12)
    with pytest.raises(ValueError, match="weight: got"):
        kernel.per_head_linear(torch.randn(5, 3, 20).half(), weight)
