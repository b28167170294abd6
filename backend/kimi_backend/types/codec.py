"""One frozen plan or reply <-> one contiguous uint8 array, for a process border.

A step crosses Triton Server (and a tensor-parallel broadcast) as a single tensor: some thirty named tensors would cost
more than the step's whole scheduling. Layout, in native byte order (both ends run on one host):

    int64 header   [magic, number of fields, then for each field: number of dimensions, dim 0, dim 1, dim 2]
    data           each array's bytes in field order, every one starting at a multiple of 8

Fields stand in the order of the dataclass, nested dataclasses in place. An int or bool is an int64 of no dimensions; an
absent optional field has -1 dimensions and no data. Decoded arrays are read-only views of the buffer.

A nested dataclass that says `packed_whole` is one field, a packed message of its own, and may be absent. Where it says
`is_kept`, it is packed once as long as the same object comes, and unpacked once as long as the same bytes come: a
batch's sampling parameters are two thirds of a plan's fields and the same from step to step. Its arrays must not be
written to.
"""

import dataclasses
import functools
import math
import operator
import struct
import types
import typing
from collections import deque
from collections.abc import Callable, Iterator
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
_PADDING = tuple(bytes(-n % _ALIGNMENT) for n in range(_ALIGNMENT))
_SCALAR = struct.Struct("=q")


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    name: str
    dtype: np.dtype[Any] | None
    """None for a nested dataclass."""
    nested: type | None = None
    scalar: type[int] | None = None
    """int or bool where the field is no array."""
    whole: type | None = None
    """The class of a nested dataclass that is packed whole."""
    is_optional: bool = False

    @property
    def least_dimensions(self) -> int:
        return 0 if self.scalar is not None else 1

    @property
    def most_dimensions(self) -> int:
        if self.scalar is not None:
            return 0
        return 1 if self.whole is not None else _WORDS_PER_FIELD - 1


class _Malformed(ValueError):
    """A packed message that breaks the layout; its text quotes nothing of the message."""


def _array_dtype(annotation: Any) -> np.dtype[Any] | None:
    """Return the dtype of `NDArray[scalar]`, which numpy 2.5 made an alias of its own; None of anything else."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is np.ndarray:
        return np.dtype(typing.get_args(arguments[1])[0])
    return np.dtype(arguments[0]) if origin is not None and origin is npt.NDArray else None


def _describe(name: str, annotation: Any) -> _Field | None:
    if isinstance(annotation, types.UnionType):
        present = next(a for a in annotation.__args__ if a is not types.NoneType)
        field = _describe(name, present)
        return None if field is None else dataclasses.replace(field, is_optional=True)
    if annotation in (int, bool):
        return _Field(name, np.dtype(np.int64), scalar=annotation)
    dtype = _array_dtype(annotation)
    if dtype is not None:
        return _Field(name, dtype)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        if getattr(annotation, "packed_whole", False):
            return _Field(name, np.dtype(np.uint8), whole=annotation)
        fields = _schema(annotation)
        return _Field(name, None, annotation) if fields else None
    return None  # a value that cannot cross a border, such as a tensor handle: sent beside the buffer


@functools.cache
def _schema(cls: Any) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(cls)
    fields = (_describe(f.name, hints[f.name]) for f in dataclasses.fields(cls))
    return tuple(field for field in fields if field is not None)


@functools.cache
def _leaves(cls: Any) -> tuple[tuple[str, _Field], ...]:
    """Every field that is packed, with its path from the message, nested ones in place."""
    leaves: list[tuple[str, _Field]] = []
    for field in _schema(cls):
        if field.nested is None:
            leaves.append((field.name, field))
        else:
            leaves += ((f"{field.name}.{path}", leaf) for path, leaf in _leaves(field.nested))
    return tuple(leaves)


@functools.cache
def _packer(cls: Any) -> tuple[Callable[[Any], tuple[Any, ...]], tuple[_Field, ...]]:
    """Make the function that gets all values of a message at once, and their fields."""
    paths, fields = zip(*_leaves(cls), strict=True)
    return operator.attrgetter(*paths), fields


_NUM_KEPT = 4
"""The shapes that a process keeps: a plan of either model, and one more each for a batch that comes and goes."""
_packed: deque[tuple[Any, Buffer]] = deque(maxlen=_NUM_KEPT)
_unpacked: deque[tuple[type, bytes, Any]] = deque(maxlen=_NUM_KEPT)


def _is_kept(cls: Any) -> bool:
    return getattr(cls, "is_kept", False)


def _pack_whole(message: Any) -> Buffer:
    if not _is_kept(type(message)):
        return encode(message)
    for kept, buffer in tuple(_packed):
        if kept is message:
            return buffer
    buffer = encode(message)
    _packed.append((message, buffer))
    return buffer


def _unpack_whole(cls: Any, data: bytes) -> Any:
    if not _is_kept(cls):
        return decode(cls, np.frombuffer(data, np.uint8))
    for kept_cls, kept, message in tuple(_unpacked):
        if kept_cls is cls and kept == data:
            return message
    message = decode(cls, np.frombuffer(data, np.uint8))
    _unpacked.append((cls, data, message))
    return message


def encode(message: Any) -> Buffer:
    """Pack a plan or a reply; fields that hold tensor handles are left out."""
    cls: Any = type(message)
    values_of, fields = _packer(cls)
    header = [_MAGIC, len(fields)]
    parts: list[bytes] = []
    for field, value in zip(fields, values_of(message), strict=True):
        if value is None:
            header += (_ABSENT, *_NO_DIMENSIONS)
        elif field.scalar is not None:
            header += (0, *_NO_DIMENSIONS)
            parts.append(_SCALAR.pack(value))
        else:
            array = value if field.whole is None else _pack_whole(value)
            if type(array) is not np.ndarray or array.dtype != field.dtype:
                array = np.ascontiguousarray(value, dtype=field.dtype).reshape(np.shape(value))
            shape = array.shape
            header += (len(shape), *shape, *_NO_DIMENSIONS[len(shape) :])
            data = array.tobytes()
            parts.append(data)
            if padding := _PADDING[len(data) % _ALIGNMENT]:
                parts.append(padding)
    packed = bytearray().join((struct.pack(f"={len(header)}q", *header), *parts))
    return np.frombuffer(packed, dtype=np.uint8)


class _Reader:
    """The values of a packed message, one after another."""

    def __init__(self, buffer: Buffer) -> None:
        if buffer.nbytes < 2 * _ALIGNMENT:
            raise InvalidRequestError(f"plan: {buffer.nbytes} bytes given, at least {2 * _ALIGNMENT} needed")
        # A writable buffer must not make the decoded plan writable.
        self._bytes = buffer.data.toreadonly()
        magic, self._num_fields = struct.unpack_from("=2q", self._bytes)
        if magic != _MAGIC:
            raise InvalidRequestError("plan: its header is not one of this version")

    def values(self, fields: tuple[_Field, ...]) -> Iterator[Any]:
        """One value a field: an array, a number, or None."""
        if self._num_fields != len(fields):
            raise InvalidRequestError(f"plan: its header is not one of {len(fields)} fields: other version?")
        data, num_words = self._bytes, self._num_fields * _WORDS_PER_FIELD
        words = struct.unpack_from(f"={num_words}q", data, 2 * _ALIGNMENT)
        offset = (2 + num_words) * _ALIGNMENT
        for at, field in zip(range(0, num_words, _WORDS_PER_FIELD), fields, strict=True):
            ndim = words[at]
            if ndim == _ABSENT:
                if not field.is_optional:
                    raise _Malformed(f"{field.name} is missing")
                yield None
            elif not field.least_dimensions <= ndim <= field.most_dimensions:
                raise _Malformed(f"{field.name} has another number of dimensions")
            elif field.scalar is not None:
                yield field.scalar(_SCALAR.unpack_from(data, offset)[0])
                offset += _ALIGNMENT
            else:
                shape = words[at + 1 : at + 1 + ndim]
                if min(shape) < 0:
                    raise _Malformed(f"{field.name} has a negative size")
                array = np.frombuffer(data, field.dtype, math.prod(shape), offset)
                if field.whole is not None:
                    yield _unpack_whole(field.whole, array.tobytes())
                else:
                    yield array if ndim == 1 else array.reshape(shape)
                offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


def _build(cls: Any, arrived: Iterator[Any], beside: dict[str, Any]) -> Any:
    values = dict(beside)
    for field in _schema(cls):
        values[field.name] = next(arrived) if field.nested is None else _build(field.nested, arrived, {})
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
        any_cls: Any = cls  # mypy does not see that a class hashes
        arrived = _Reader(buffer).values(_packer(any_cls)[1])
        return typing.cast("Message", _build(any_cls, arrived, beside))
    except (ValueError, IndexError, OverflowError, struct.error) as error:
        # The message of any other error may quote the header.
        reason = str(error) if isinstance(error, _Malformed) else "its arrays are not as long as its header says"
        raise InvalidRequestError(f"plan: {buffer.nbytes} bytes do not hold a {cls.__name__}: {reason}") from None
