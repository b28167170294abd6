"""Triton-language's interpreter in tests: marks of those that run kernels in it, on a CPU."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

INTERPRETED = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there: the gpu tests run compiled kernels"),
    # The interpreter turns one-element arrays into loop bounds in a way that newer numpy dislikes.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    # Lanes that a mask discards afterwards.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def _patch_language_once() -> None:
    """Leave Triton-language as its interpreter patches it, which else does so at each call of a device function.

    That took two fifths of these tests' time. The scopes of those calls are never restored either.
    """
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


def _compute_no_check_that_nobody_reads() -> None:
    """Leave out the check of every integer sum and product for overflow, seven operations each.

    The interpreter computes it and then asserts it in its debug mode only, which is off.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _reduce_by_xor_at_once() -> None:
    """Have NumPy compute the sums by xor of which `tl.sort` is made.

    The interpreter knows the usual sums, and calls a device function for each element of another: a sort of 256
    values took ten times as long.
    """
    one_by_one = interpreter.ReduceOps.generic_reduce

    def reduce(op: interpreter.ReduceOps, values: Sequence[tl.tensor]) -> list[tl.tensor]:
        if op.combine_fn != tl.standard._xor_combine:
            return one_by_one(op, values)  # type: ignore[no-any-return]
        (value,) = values
        found = np.bitwise_xor.reduce(value.handle.data, axis=op.axis, keepdims=op.keep_dims)
        return [op.to_tensor(found, value.dtype)]

    interpreter.ReduceOps.generic_reduce = reduce


if not torch.cuda.is_available():
    _patch_language_once()
    _compute_no_check_that_nobody_reads()
    _reduce_by_xor_at_once()
