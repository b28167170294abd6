"""Writes safetensors shards and their index, a few megabytes in memory at a time.

The format (github.com/huggingface/safetensors, "Format"): header length as uint64 little-endian, a JSON header with
each tensor's dtype, shape and byte range, then the bytes. The library's own writer wants whole tensors in memory, and a
vocabulary matrix of a large model does not fit.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kimi_backend.checkpoint.progress import Advance, no_progress
from kimi_backend.checkpoint.safetensors_source import INDEX_FILE, SINGLE_FILE, TORCH_DTYPES
from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.errors import CheckpointError

DEFAULT_SHARD_BYTES = 5 * 10**9
_CHUNK_BYTES = 1 << 25
_HEADER_ALIGNMENT = 8
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor to be written."""

    name: str
    stored_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


def write_checkpoint(
    folder: Path,
    source: TensorSource,
    names: Sequence[str],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    stored_name: Callable[[str], str] = lambda name: name,
    stored_dtype: Callable[[str, torch.dtype], torch.dtype] = lambda _, dtype: dtype,
    advance: Advance = no_progress,
) -> list[Path]:
    """Write tensors into `folder`: one file if they fit, else shards and their index.

    Args:
        names: what to write, in this order.
        shard_bytes: most bytes of tensors a file (a larger tensor gets a file to itself).
        stored_name: name in the source -> name in the file.
        stored_dtype: (name, dtype in the source) -> dtype in the file; values are converted.
        advance: called with the number of bytes of each piece written.
    Returns:
        The files, without the index.
    Raises:
        CheckpointError: a tensor cannot be read, or a file cannot be written.
    """
    entries = [
        _Entry(name, stored_name(name), source.shape(name), stored_dtype(name, source.dtype(name))) for name in names
    ]
    shards = list(_shards(entries, shard_bytes))
    if len(shards) == 1:
        files = [folder / SINGLE_FILE]
    else:
        files = [folder / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    try:
        for file, shard in zip(files, shards, strict=True):
            _write_file(file, source, shard, advance)
        if len(shards) > 1:
            _write_index(folder / INDEX_FILE, files, shards)
    except OSError as error:
        raise CheckpointError(str(folder), [f"cannot be written: {error.strerror or error}"]) from error
    return files


def _shards(entries: list[_Entry], shard_bytes: int) -> Iterator[list[_Entry]]:
    shard: list[_Entry] = []
    size = 0
    for entry in entries:
        if shard and size + entry.num_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += entry.num_bytes
    yield shard


def _write_file(file: Path, source: TensorSource, entries: list[_Entry], advance: Advance) -> None:
    # Wide elements first, so that every tensor begins at a multiple of its element size.
    entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        header[entry.stored_name] = {
            "dtype": _DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.num_bytes],
        }
        offset += entry.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    unfinished = file.with_suffix(".unfinished")
    try:
        with unfinished.open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)))
            stream.write(text)
            for entry in entries:
                for piece in _pieces(source, entry):
                    stream.write(piece)
                    advance(len(piece))
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.rename(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _pieces(source: TensorSource, entry: _Entry) -> Iterator[memoryview]:
    """A tensor's bytes, a few rows at a time."""
    num_rows = entry.shape[0] if entry.shape else 1
    rows_each = max(1, _CHUNK_BYTES * num_rows // max(1, entry.num_bytes))
    for start in range(0, num_rows, rows_each):
        rows = source.read(entry.name, 0, start, min(start + rows_each, num_rows))
        yield rows.to(entry.dtype).contiguous().view(torch.uint8).flatten().numpy().data


def _write_index(index: Path, files: list[Path], shards: list[list[_Entry]]) -> None:
    weight_map = {entry.stored_name: file.name for file, shard in zip(files, shards, strict=True) for entry in shard}
    total = sum(entry.num_bytes for shard in shards for entry in shard)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    unfinished = index.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.rename(index)
