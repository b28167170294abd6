"""Triton-language's interpreter in tests: marks of those that run kernels in it, on a CPU."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
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


def _remember_shapes_and_types() -> None:
    """Have values of one shape share what says so, and numbers of one type the NumPy type found for them.

    The interpreter makes each anew, and checks it, several times an operation: that took half of these tests' time.
    """
    shapes: dict[tuple[int, ...], tuple[tl.tuple, tl.tuple, tl.constexpr, str]] = {}
    broadcasts: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}
    numpy_types: dict[str, np.dtype] = {}
    make_block_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    broadcast, numpy_type_of = TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype

    def init_block_type(block: tl.block_type, element_ty: tl.dtype, shape: Sequence[int | tl.constexpr]) -> None:
        sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
        if sizes not in shapes:
            make_block_type(block, element_ty, shape)
            constants = tl.tuple([tl.constexpr(size) for size in sizes])
            shapes[sizes] = block.shape, constants, tl.constexpr(block.numel), str(block.shape)
        block.shape, _, numel, text = shapes[sizes]
        block.element_ty, block.numel, block.sizes, block.name = (
            element_ty,
            numel.value,
            sizes,
            f"<{text}, {element_ty}>",
        )

    def init_tensor(tensor: tl.tensor, handle: interpreter.TensorHandle, type: tl.dtype) -> None:
        sizes = getattr(type, "sizes", None)
        if sizes is None:
            make_tensor(tensor, handle, type)
        else:
            _, tensor.shape, tensor.numel, _ = shapes[sizes]
            tensor.handle, tensor.type, tensor.dtype = handle, type, type.element_ty

    def broadcast_to_each_other(
        semantic: TritonSemantic, left: tl.tensor, right: tl.tensor
    ) -> tuple[tl.tensor, tl.tensor]:
        both = getattr(left.type, "sizes", None), getattr(right.type, "sizes", None)
        if both[0] == both[1]:
            return left, right
        if None in both:  # a number and a block
            return broadcast(semantic, left, right)  # type: ignore[no-any-return]
        if both not in broadcasts:
            broadcasts[both] = np.broadcast_shapes(*both)
        return widened(semantic, left, broadcasts[both]), widened(semantic, right, broadcasts[both])

    def widened(semantic: TritonSemantic, value: tl.tensor, sizes: tuple[int, ...]) -> tl.tensor:
        if value.type.sizes == sizes:
            return value
        block = tl.block_type(value.type.element_ty, list(sizes))
        return semantic.tensor(semantic.builder.create_broadcast(value.handle, sizes), block)

    def known_numpy_type(type: tl.dtype) -> np.dtype:
        if type.name not in numpy_types:
            numpy_types[type.name] = numpy_type_of(type)
        return numpy_types[type.name]

    tl.block_type.__init__, tl.tensor.__init__ = init_block_type, init_tensor
    TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype = broadcast_to_each_other, known_numpy_type


if not torch.cuda.is_available():
    _remember_shapes_and_types()
    _patch_language_once()
    _compute_no_check_that_nobody_reads()
    _reduce_by_xor_at_once()
