"""Tensors of a checkpoint folder: one safetensors file, or shards with or without their index."""

import json
import os
import re
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError, safe_open

from kimi_backend.config.regular_files import read_regular_text
from kimi_backend.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_FILES = 10_000
"""The most files of an index: a number beyond it is a damaged file."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TEXT_PREFIX = "language_model."
_LATER_TEXT_PREFIX = "model.language_model."
"""The prefix of transformers 5: `model.language_model.layers…` beside `lm_head`."""
SKIPPED_PREFIXES = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in ("vision_tower.", "mm_projector.", "multi_modal_projector.", "visual.")
)
_LENGTH_BYTES = 8
_COLUMN_BYTES = 1 << 24
"""Rows read at once where a slice of their columns is kept."""
_SHARD_NAME = re.compile(r".*-of-0*(\d+)\.safetensors$")

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor, and what its header says."""

    file: Path
    stored_name: str
    shape: tuple[int, ...]
    dtype_name: str
    offset: int
    """The place of its first byte in the file."""


class _OpenFile:
    """A descriptor that is closed when nobody holds it."""

    def __init__(self, file: Path) -> None:
        self.descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, num_bytes: int, offset: int) -> torch.Tensor:
        """[num_bytes] uint8. Raises OSError."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        view, done = memoryview(cast("Buffer", buffer.numpy())), 0
        while done < num_bytes:
            count = os.preadv(self.descriptor, [view[done:]], offset + done)
            if not count:
                raise OSError("the file has become shorter")
            done += count
        return buffer


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    """A `TensorSource` over files: `read` reads rows where they lie, and of columns a few megabytes at a time.

    Bytes go from the file into the tensor, not through a mapping: a mapped page costs a fault and stays in the process,
    and several threads may read at once.

    Names are those of a text model, `model.layers…` and `lm_head…`; vision and projector tensors are left out.
    """

    path: Path
    _tensors: dict[str, StoredTensor] = field(repr=False)
    _files: dict[Path, _OpenFile] = field(repr=False)
    _names: frozenset[str] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> "SafetensorsSource":
        """Read the headers of a checkpoint folder, or of one .safetensors file.

        Raises:
            CheckpointError: files are absent, truncated or corrupt, or the index does not describe them; all of it is
                listed.
        """
        path = Path(path)
        problems: list[str] = []
        files: dict[Path, _OpenFile] = {}
        tensors: dict[str, StoredTensor] = {}
        index = _read_index(path / INDEX_FILE, problems) if path.is_dir() else None
        for file in _weight_files(path, index, problems):
            try:
                # The library checks the header; what it says is read here, since the library does not tell offsets.
                with safe_open(file, framework="pt"):
                    files[file] = _OpenFile(file)
                _collect(file, files[file], tensors, problems)
            except (SafetensorError, OSError, ValueError) as error:
                problems.append(f"{file.name}: cannot be read as safetensors ({_one_line(error)})")
        if index is not None:
            _check_index(index, tensors, {file.name for file in files}, problems)
        if problems:
            raise CheckpointError(str(path), problems)
        kept = _text_tensors(tensors, path)
        return cls(path, kept, files, frozenset(kept))

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        stored = self._stored(name)
        try:
            return TORCH_DTYPES[stored.dtype_name]
        except KeyError:
            allowed = ", ".join(TORCH_DTYPES)
            raise CheckpointError(
                str(stored.file), [f"{name}: dtype {stored.dtype_name}, expected one of {allowed}"]
            ) from None

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        stored, dtype = self._stored(name), self.dtype(name)
        shape = stored.shape or (1,)
        stop = shape[dim] if stop is None else stop
        if not 0 <= start <= stop <= shape[dim]:
            raise CheckpointError(
                str(stored.file), [f"{name}: elements {start}:{stop} of dimension {dim} of {list(stored.shape)}"]
            )
        row_bytes = dtype.itemsize * _product(shape[1:])
        try:
            if dim == 0:
                rows = self._read_rows(stored, start * row_bytes, (stop - start) * row_bytes)
                return rows.view(dtype).view(stored.shape and (stop - start, *shape[1:]))
            kept = torch.empty((*shape[:dim], stop - start, *shape[dim + 1 :]), dtype=dtype)
            rows_each = max(1, _COLUMN_BYTES // max(1, row_bytes))
            for first in range(0, shape[0], rows_each):
                last = min(first + rows_each, shape[0])
                rows = self._read_rows(stored, first * row_bytes, (last - first) * row_bytes)
                kept[first:last] = rows.view(dtype).view(last - first, *shape[1:]).narrow(dim, start, stop - start)
            return kept
        except OSError as error:
            raise CheckpointError(str(stored.file), [f"{name}: cannot be read ({_one_line(error)})"]) from error

    def _read_rows(self, stored: StoredTensor, offset: int, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, from `offset` within the tensor."""
        return self._files[stored.file].read(num_bytes, stored.offset + offset)

    def num_bytes(self) -> int:
        """Bytes of all tensors that are not left out."""
        total = 0
        for name, stored in self._tensors.items():
            total += self.dtype(name).itemsize * _product(stored.shape)
        return total

    def _stored(self, name: str) -> StoredTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(str(self.path), [f"tensor {name!r} is missing"]) from None


def _weight_files(path: Path, index: Mapping[str, str] | None, problems: list[str]) -> list[Path]:
    """The files that hold the weights; what is absent goes to problems."""
    if path.is_file():
        if path.suffix == ".safetensors":
            return [path]
        problems.append(f"{path.name} is a file, expected a checkpoint folder or a .safetensors file")
        return []
    if not path.is_dir():
        problems.append("no such folder")
        return []
    if index is not None:
        files = [path / name for name in sorted(set(index.values()))]
    elif (path / SINGLE_FILE).exists():
        files = [path / SINGLE_FILE]
    else:
        files = sorted(path.glob("*.safetensors"))
        problems += _absent_shards(files)
        if not files:
            problems.append(f"holds no .safetensors file, expected {SINGLE_FILE} or shards with {INDEX_FILE}")
    for file in files:
        if not file.is_file():
            reason = "absent" if not file.exists() else "no file"
            listed = "" if index is None else f"listed in {INDEX_FILE} but "
            problems.append(f"{file.name} is {listed}{reason}")
    return [file for file in files if file.is_file()]


def _absent_shards(files: list[Path]) -> list[str]:
    """Shards that the others' names promise: model-00001-of-00003.safetensors and so on."""
    numbered = [match for match in (_SHARD_NAME.match(file.name) for file in files) if match]
    totals = {int(match.group(1)) for match in numbered}
    if len(totals) == 1 and totals != {len(numbered)}:
        return [f"{len(numbered)} shards found, expected {totals.pop()} as their names say"]
    return [f"shards of different sets found (of {sorted(totals)}), expected one set"] if len(totals) > 1 else []


def _read_index(index: Path, problems: list[str]) -> Mapping[str, str] | None:
    """Tensor name -> file name; None where there is no index."""
    if not index.exists():
        return None
    try:
        weight_map = json.loads(read_regular_text(index))["weight_map"]
        named = set(weight_map.values())
    except OSError as error:
        problems.append(f"{index.name}: cannot be read ({error.strerror})")
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problems.append(f"{index.name}: expected JSON with an object weight_map ({_one_line(error)})")
        return {}
    wrong = sorted((file for file in named if not isinstance(file, str) or Path(file).name != file), key=str)
    if len(named) > MAX_FILES:
        problems.append(f"{index.name}: weight_map names {len(named)} files, expected at most {MAX_FILES}")
        return {}
    if wrong:
        problems.append(f"{index.name}: weight_map holds {wrong[0]!r}, expected file names without folders")
        return {}
    mapping: Mapping[str, str] = weight_map
    return mapping


def _collect(file: Path, stream: _OpenFile, tensors: dict[str, StoredTensor], problems: list[str]) -> None:
    """The tensors of one file, whose header has been checked, under their stored names."""
    (length,) = struct.unpack("<Q", stream.read(_LENGTH_BYTES, 0).numpy().tobytes())
    header = json.loads(stream.read(length, _LENGTH_BYTES).numpy().tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        offset = _LENGTH_BYTES + length + entry["data_offsets"][0]
        stored = StoredTensor(file, name, tuple(entry["shape"]), entry["dtype"], offset)
        other = tensors.setdefault(name, stored)
        if other is not stored:
            problems.append(f"tensor {name!r} is in both {other.file.name} and {file.name}, expected one")


def _check_index(
    index: Mapping[str, str], tensors: dict[str, StoredTensor], files: set[str], problems: list[str]
) -> None:
    """Each tensor of the index must be in the file that the index says, where that file could be read."""
    for name, file in index.items():
        stored = tensors.get(name)
        if file in files and (stored is None or stored.file.name != file):
            where = "no file" if stored is None else stored.file.name
            problems.append(f"{INDEX_FILE}: tensor {name!r} is listed in {file}, found in {where}")


def _text_tensors(tensors: dict[str, StoredTensor], path: Path) -> dict[str, StoredTensor]:
    """The tensors without their prefix, and without those that a text server does not need."""
    kept: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for stored_name, stored in tensors.items():
        if stored_name.startswith(SKIPPED_PREFIXES):
            continue
        other = kept.setdefault(_text_name(stored_name), stored)
        if other is not stored:
            problems.append(f"tensors {other.stored_name!r} and {stored_name!r} are the same one, expected one of them")
    if problems:
        raise CheckpointError(str(path), problems)
    return kept


def _text_name(stored_name: str) -> str:
    if stored_name.startswith(_LATER_TEXT_PREFIX):
        return f"model.{stored_name.removeprefix(_LATER_TEXT_PREFIX)}"
    return stored_name.removeprefix(TEXT_PREFIX)


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
