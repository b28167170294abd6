"""The sources of a model's weights, by checkpoint name: files, memory, or a random generator."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from kimi_backend.errors import CheckpointError


class TensorSource(Protocol):
    """Named tensors of a checkpoint, read one at a time, in slices, so that a rank reads only what it holds."""

    def names(self) -> frozenset[str]:
        """All names, without a `language_model.` prefix."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The tensor's elements `start:stop` of dimension `dim`, in the stored dtype, on the CPU (made weights: where
        they are made).

        Raises:
            CheckpointError: no such tensor, or its file cannot be read.
        """
        ...


class SourceWrapper:
    """The common part of sources over another one, which have its names, shapes and types and do something as they
    read."""

    __slots__ = ()
    source: TensorSource

    def names(self) -> frozenset[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self.source.dtype(name)


@dataclass(frozen=True, slots=True)
class InMemoryTensors:
    """A source over tensors that are already there."""

    tensors: Mapping[str, torch.Tensor]

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._get(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._get(name).dtype

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = self._get(name)
        if stop is None and start == 0:
            return tensor
        return tensor.narrow(dim, start, (tensor.shape[dim] if stop is None else stop) - start)

    def _get(self, name: str) -> torch.Tensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError("checkpoint in memory", [f"tensor {name!r} is missing"]) from None
