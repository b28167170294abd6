"""The norms, each implementation against float64 formulas."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kimi_kernels.rms_norm import naive
from support.implementations import FLOATS, assert_rounded, implementations

EPS = 1e-5
SIZES = [(0, 8), (1, 1), (3, 63), (5, 64), (4, 7168)]
every_implementation = implementations("rms_norm")


def check(ops: ModuleType, name: str, *arguments: Tensor) -> None:
    """Compare an op with its judge; it changes none of its arguments."""
    before = [argument.clone() for argument in arguments]
    found, expected = getattr(ops, name)(*arguments, EPS), getattr(naive, name)(*arguments, EPS)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for out, want in pairs:
        assert_rounded(ops, out, want, arguments[0].dtype)
    assert all(torch.equal(argument, old) for argument, old in zip(arguments, before, strict=True))


@every_implementation
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_tokens", "width"), SIZES)
def test_each_row_is_normed(ops: ModuleType, num_tokens: int, width: int, dtype: torch.dtype) -> None:
    x, residual, other, wide = torch.randn(4, num_tokens, 2 * width).to(dtype).unbind()
    weight, wide_weight = torch.randn(width).to(dtype), torch.randn(2 * width).to(dtype)
    check(ops, "rms_norm", x[:, :width], weight)
    check(ops, "add_rms_norm", x[:, width:], residual[:, :width], weight)
    check(ops, "concat_rms_norm", other[:, :width], weight, 100 * wide, wide_weight)
    chunks = torch.randn(num_tokens, 3 * width).to(dtype)
    chunks[:, :width] *= 100
    check(ops, "chunked_rms_norm", chunks, torch.randn(3, width).to(dtype))


@every_implementation
@pytest.mark.parametrize("scale", [0.0, 1e-18, 1e-4, 1e4, 1e18])
def test_nothing_overflows_or_is_divided_by_zero(ops: ModuleType, scale: float) -> None:
    check(ops, "rms_norm", torch.randn(3, 16) * scale, torch.ones(16))


@every_implementation
def test_rows_may_lie_apart(ops: ModuleType) -> None:
    wide = torch.full((4, 100), torch.nan)
    wide[:, 20:68] = torch.randn(4, 48)
    part, weight = wide[:, 20:68], torch.randn(48)
    assert_rounded(ops, ops.rms_norm(part, weight, EPS), naive.rms_norm(part, weight, EPS), torch.float32)
    assert torch.equal(ops.rms_norm(part, weight, EPS), ops.rms_norm(part.contiguous(), weight, EPS))


@every_implementation
@pytest.mark.parametrize("dtype", FLOATS)
def test_two_addends_are_summed_and_rounded_first(ops: ModuleType, dtype: torch.dtype) -> None:
    """1 + 2^-11 is 1 in halves, and 1 - 1 leaves nothing."""
    x, second, residual = torch.randn(3, 3, 72).to(dtype).unbind()
    if dtype == torch.float16:
        x[0], second[0], residual[0] = 1.0, 2.0**-11, -1.0
    weight = torch.randn(72).to(dtype)
    found, expected = (op.add_rms_norm(x, residual, weight, EPS, second) for op in (ops, naive))
    for out, want in zip(found, expected, strict=True):
        assert_rounded(ops, out, want, dtype)
    if dtype == torch.float16:
        assert not found[1][0].any()


@every_implementation
def test_the_norm_is_of_the_sum_as_returned(ops: ModuleType) -> None:
    x, residual, weight = torch.randn(3, 64).half(), torch.randn(3, 64).half(), torch.randn(64)
    normed, total = ops.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, (x.double() + residual.double()).half())
    assert torch.equal(normed, ops.rms_norm(total, weight, EPS))


ROWS, WEIGHT = torch.randn(2, 3), torch.randn(3)
WRONG: list[tuple[Callable[[ModuleType], object], str]] = [
    (lambda ops: ops.rms_norm(ROWS, torch.randn(4), EPS), r"^x: got shape \[2, 3\], expected \[any, 4\]"),
    (lambda ops: ops.rms_norm(ROWS, torch.randn(1, 3), EPS), r"^weight: got shape \[1, 3\], expected \[any\]"),
    (lambda ops: ops.rms_norm(ROWS.int(), WEIGHT, EPS), "^x: got torch.int32"),
    (lambda ops: ops.rms_norm(torch.ones(2, 6)[:, ::2], WEIGHT, EPS), "^x: got column stride 2, expected 1"),
    (lambda ops: ops.rms_norm(torch.ones(2, 0), torch.ones(0), EPS), "^x: got no columns, expected at least one"),
    (lambda ops: ops.add_rms_norm(ROWS, torch.randn(3, 3), WEIGHT, EPS), r"^residual: .*\[3, 3\]"),
    (lambda ops: ops.add_rms_norm(ROWS, ROWS, torch.randn(4), EPS), r"^x: .*expected \[any, 4\]"),
    (lambda ops: ops.add_rms_norm(ROWS, ROWS, WEIGHT, EPS, ROWS[:1]), r"^second: got shape \[1, 3\]"),
    (lambda ops: ops.add_rms_norm(ROWS, ROWS, WEIGHT, EPS, ROWS.half()), "^second: got torch.float16"),
    (lambda ops: ops.add_rms_norm(ROWS, torch.ones(2, 6)[:, ::2], WEIGHT, EPS), "^residual: got column stride 2"),
    (
        lambda ops: ops.concat_rms_norm(ROWS, WEIGHT, ROWS[:1], WEIGHT, EPS),
        r"^b: got shape \[1, 3\], expected \[2, 3\]",
    ),
    (lambda ops: ops.concat_rms_norm(ROWS, torch.ones(1, 3), ROWS, WEIGHT, EPS), "^a_weight: got shape"),
    (lambda ops: ops.chunked_rms_norm(torch.randn(2, 7), torch.randn(2, 3), EPS), r"^x: .*expected \[any, 6\]"),
    (lambda ops: ops.chunked_rms_norm(ROWS, torch.randn(0, 3), EPS), "^weights: .*at least one chunk"),
]


@every_implementation
@pytest.mark.parametrize(("call", "message"), WRONG)
def test_a_wrong_argument_is_named(ops: ModuleType, call: Callable[[ModuleType], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(ops)
