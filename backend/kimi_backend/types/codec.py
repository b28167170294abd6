"""One frozen plan or reply <-> one contiguous uint8 array, for a process border.

A step crosses Triton Server (and a tensor-parallel broadcast) as a single tensor: some thirty named tensors would cost
more than the step's whole scheduling. Layout, in native byte order (both ends run on one host):

    int64 header   [magic, number of fields, then for each field: number of dimensions, dim 0, dim 1, dim 2]
    data           each array's bytes in field order, every one starting at a multiple of 8

Fields stand in the order of the dataclass, nested dataclasses in place. An int or bool is an array of no dimensions; an
absent optional field has -1 dimensions and no data. Decoded arrays are read-only views of the buffer.
"""

import dataclasses
import functools
import math
import types
import typing
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kimi_backend.errors import InvalidRequestError

Message = TypeVar("Message")
Buffer = npt.NDArray[np.uint8]

_MAGIC = 0x4B494D49_0001
_WORDS_PER_FIELD = 4
_ALIGNMENT = 8
_ABSENT = -1
_NO_DIMENSIONS = (0,) * (_WORDS_PER_FIELD - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    name: str
    dtype: np.dtype[Any] | None
    """None for a nested dataclass."""
    nested: type | None
    is_scalar: bool


def _array_dtype(annotation: Any) -> np.dtype[Any]:
    return np.dtype(typing.get_args(typing.get_args(annotation)[1])[0])


def _describe(name: str, annotation: Any) -> _Field | None:
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in annotation.__args__ if a is not types.NoneType)
    if annotation in (int, bool):
        return _Field(name, np.dtype(np.int64 if annotation is int else np.bool_), None, True)
    if typing.get_origin(annotation) is np.ndarray:
        return _Field(name, _array_dtype(annotation), None, False)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        fields = _schema(annotation)
        return _Field(name, None, annotation, False) if fields else None
    return None  # a value that cannot cross a border, such as a tensor handle: sent beside the buffer


@functools.cache
def _schema(cls: Any) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(cls)
    fields = (_describe(f.name, hints[f.name]) for f in dataclasses.fields(cls))
    return tuple(field for field in fields if field is not None)


def _collect(message: Any, arrays: list[npt.NDArray[Any] | None]) -> None:
    cls: Any = type(message)
    for field in _schema(cls):
        value = getattr(message, field.name)
        if field.nested is not None:
            _collect(value, arrays)
        elif value is None or (isinstance(value, np.ndarray) and value.dtype == field.dtype):
            arrays.append(value)
        else:
            arrays.append(np.ascontiguousarray(value, dtype=field.dtype).reshape(np.shape(value)))


def encode(message: Any) -> Buffer:
    """Pack a plan or a reply; fields that hold tensor handles are left out."""
    arrays: list[npt.NDArray[Any] | None] = []
    _collect(message, arrays)
    header = [_MAGIC, len(arrays)]
    parts: list[bytes] = []
    for array in arrays:
        if array is None:
            header += (_ABSENT, 0, 0, 0)
            continue
        header += (array.ndim, *array.shape, *_NO_DIMENSIONS[array.ndim :])
        data = array.tobytes()
        parts += (data, bytes(-len(data) % _ALIGNMENT))
    packed = bytearray().join((np.array(header, dtype=np.int64).tobytes(), *parts))
    return np.frombuffer(packed, dtype=np.uint8)


class _Reader:
    def __init__(self, buffer: Buffer) -> None:
        if buffer.nbytes < 2 * _ALIGNMENT:
            raise InvalidRequestError(f"plan: {buffer.nbytes} bytes given, at least {2 * _ALIGNMENT} needed")
        # A writable buffer must not make the decoded plan writable.
        self._bytes = buffer.view()
        self._bytes.flags.writeable = False
        magic, self._num_fields = self._bytes[: 2 * _ALIGNMENT].view(np.int64).tolist()
        if magic != _MAGIC:
            raise InvalidRequestError(f"plan: header {magic:#x} given, {_MAGIC:#x} expected: other version?")
        self._offset = (2 + self._num_fields * _WORDS_PER_FIELD) * _ALIGNMENT
        self._shapes = self._bytes[2 * _ALIGNMENT : self._offset].view(np.int64).reshape(-1, _WORDS_PER_FIELD).tolist()
        self._field = 0

    def check_field_count(self, expected: int) -> None:
        if self._num_fields != expected:
            raise InvalidRequestError(f"plan: {self._num_fields} fields given, {expected} expected: other version?")

    def next_array(self, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        ndim, *dims = self._shapes[self._field]
        self._field += 1
        if ndim == _ABSENT:
            return None
        shape = dims[:ndim]
        end = self._offset + math.prod(shape) * dtype.itemsize
        array = self._bytes[self._offset : end].view(dtype).reshape(shape)
        self._offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        return array


@functools.cache
def _num_fields(cls: Any) -> int:
    return sum(1 if f.nested is None else _num_fields(f.nested) for f in _schema(cls))


def _build(cls: Any, reader: _Reader, beside: dict[str, Any]) -> Any:
    values: dict[str, Any] = dict(beside)
    for field in _schema(cls):
        if field.nested is not None:
            values[field.name] = _build(field.nested, reader, {})
            continue
        assert field.dtype is not None
        array = reader.next_array(field.dtype)
        values[field.name] = array.item() if field.is_scalar and array is not None else array
    return cls(**values)


def decode(cls: type[Message], buffer: Buffer, **beside: Any) -> Message:
    """Unpack what `encode` packed.

    Args:
        buffer: [num_bytes] uint8, contiguous; the result's arrays are views of it.
        beside: fields that did not travel in the buffer, such as a tensor handle.

    Raises:
        InvalidRequestError: not a message of this version.
    """
    try:
        reader = _Reader(buffer)
        any_cls: Any = cls  # mypy does not see that a class hashes
        reader.check_field_count(_num_fields(any_cls))
        return typing.cast("Message", _build(any_cls, reader, beside))
    except (ValueError, IndexError, OverflowError) as error:
        raise InvalidRequestError(f"plan: {buffer.nbytes} bytes do not hold a {cls.__name__}: {error}") from error
