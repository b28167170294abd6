"""Inputs and results of captured steps, at addresses that never change, one copy each way.

All buckets of a runner lie in one arena, because one step runs at a time: a step's arrays are written into pinned
memory and go to the device in one copy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kimi_backend.runners.host_transfer import ALIGNMENT, TORCH_DTYPES

Shape = tuple[int, ...]
Array = npt.NDArray[Any]
HostArrays = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Names, shapes and types of a bucket's arrays, and where each starts."""

    arrays: tuple[tuple[str, Shape, np.dtype[Any], int], ...]
    num_bytes: int

    @classmethod
    def of(cls, specs: Mapping[str, tuple[Shape, npt.DTypeLike]]) -> "ArrayLayout":
        """specs: name -> (shape, dtype)."""
        arrays, start = [], 0
        for name, (shape, dtype) in specs.items():
            kind = np.dtype(dtype)
            arrays.append((name, shape, kind, start))
            size = int(np.prod(shape)) * kind.itemsize
            start += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(tuple(arrays), start)


class Arena:
    """Bytes on both sides; large enough for the largest of some layouts, behind the largest of some others."""

    def __init__(
        self, layouts: Iterable[ArrayLayout], device: torch.device, before: Iterable[ArrayLayout] = ()
    ) -> None:
        """before: layouts that end where those of `layouts` begin, so that one copy takes both."""
        self.middle = max((layout.num_bytes for layout in before), default=0)
        size = self.middle + max((layout.num_bytes for layout in layouts), default=0)
        self.host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)


class StaticArrays:
    """Views of an arena by one layout."""

    def __init__(self, layout: ArrayLayout, arena: Arena, *, is_before: bool = False) -> None:
        """is_before: the layout is one of the arena's `before`."""
        self._arena = arena
        self._begin = arena.middle - layout.num_bytes if is_before else arena.middle
        self._end = self._begin + layout.num_bytes
        host = arena.host.numpy()
        self.host: dict[str, Array] = {}
        """Written before `upload`."""
        self.device: dict[str, torch.Tensor] = {}
        """Read by the captured step."""
        for name, shape, kind, offset in layout.arrays:
            start = self._begin + offset
            stop = start + int(np.prod(shape)) * kind.itemsize
            self.host[name] = host[start:stop].view(kind).reshape(shape)
            self.device[name] = arena.device[start:stop].view(TORCH_DTYPES[kind]).view(shape)

    def clear(self) -> None:
        """Make `host` zero: where a step's kernels only compile, what they would work out is then a possible index."""
        self._arena.host[self._begin : self._end].zero_()

    def upload(self, before: "StaticArrays | None" = None) -> None:
        """Queue the copy of all arrays. The next write to `host` must come after the step's results were read.

        Args:
            before: arrays that end where these begin, to be copied with them.
        """
        part = slice(self._begin if before is None else before._begin, self._end)
        self._arena.device[part].copy_(self._arena.host[part], non_blocking=True)


class StaticBlockTable:
    """The batch's block ids in a table of a fixed width, so that a graph may hold its address and stride.

    Only columns in use travel, and none when the table is the one that is there already: a sequence gets a new block
    every few tens of steps.
    """

    def __init__(self, num_seqs: int, num_columns: int, device: torch.device) -> None:
        self.tensor = torch.zeros((num_seqs, num_columns), dtype=torch.int32, device=device)
        """[num_seqs, num_columns] int32. Entries past a sequence's last block hold anything."""
        self._staged = torch.zeros(num_seqs * num_columns, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host = self._staged.numpy()
        self._shape = (0, 0)

    def upload(self, table: npt.NDArray[np.int32], num_columns: int) -> None:
        """Queue the copy of a plan's first columns.

        Args:
            table: [S, at least num_columns].
            num_columns: blocks of the longest sequence.
        """
        shape = (table.shape[0], num_columns)
        staged = self._host[: shape[0] * shape[1]].reshape(shape)
        wanted = table[:, :num_columns]
        if shape == self._shape and np.array_equal(staged, wanted):
            return
        staged[...] = wanted
        self._shape = shape
        source = self._staged[: staged.size].to(self.tensor.device, non_blocking=True)
        self.tensor[: shape[0], : shape[1]].copy_(source.view(shape))


class StaticMasks:
    """Masks of a step's rows, those that have one, and which row each belongs to."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """num_rows: of the largest step."""
        is_cuda, num_words = device.type == "cuda", -(-vocab_size // 32)
        self.tensor = torch.zeros((num_rows, num_words), dtype=torch.int32, device=device)
        """[num_rows, num_words] int32; the first `num_masked` are the step's."""
        self.of_row = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        """[num_rows] int32 which mask each row has, -1 for none."""
        self.num_masked = 0
        self._staged = torch.zeros((num_rows, num_words), dtype=torch.int32, pin_memory=is_cuda)
        self._staged_rows = torch.full((num_rows,), -1, dtype=torch.int32, pin_memory=is_cuda)
        self._uploaded = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def upload(self, masks: npt.NDArray[np.int32] | None, rows: npt.NDArray[np.int32] | None) -> None:
        """Queue the copy of a step's masks, [M, num_words], and of their rows, [M]."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        self._staged_rows.fill_(-1)
        self.num_masked = 0 if rows is None else len(rows)
        if masks is not None and rows is not None:
            self._staged.numpy()[: len(rows)] = masks
            self._staged_rows.numpy()[rows] = np.arange(len(rows), dtype=np.int32)
            self.tensor[: len(rows)].copy_(self._staged[: len(rows)], non_blocking=True)
        self.of_row.copy_(self._staged_rows, non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record()


class ArrivingWords:
    """Words on their way to the host."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(num_words, dtype=torch.int32, pin_memory=is_cuda)
        self._words = self._host.numpy()
        self._arrived = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self._count = 0

    def send(self, words: torch.Tensor) -> None:
        """Queue the copy."""
        self._count = len(words)
        self._host[: self._count].copy_(words, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> npt.NDArray[np.int32]:
        """The words, a copy. Waits for the device: the only time in a step."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._words[: self._count].copy()


class StaticResults:
    """int32 words that a captured step leaves for the host. Those of two steps may be on their way at once."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self._device = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._arriving, self._next = (ArrivingWords(num_words, device) for _ in range(2))

    def store(self, parts: list[torch.Tensor]) -> None:
        """Inside the step: keep parts, int32 or int64, one after another."""
        words = [part.contiguous().view(-1).view(torch.int32) for part in parts]
        torch.cat(words, out=self._device[: sum(len(part) for part in words)])

    @property
    def words(self) -> torch.Tensor:
        """[num_words] int32 on the device: what was stored last."""
        return self._device

    def send(self, num_words: int) -> ArrivingWords:
        """Queue the copy of the first words. They are to be waited for before the next but one is sent."""
        self._arriving, self._next = self._next, self._arriving
        self._arriving.send(self._device[:num_words])
        return self._arriving

    def fetch(self, num_words: int) -> npt.NDArray[np.int32]:
        """The first words, a copy; waits for the device."""
        return self.send(num_words).wait()
