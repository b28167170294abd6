"""A tensor source that counts what is read."""

from collections import Counter

import torch

from kimi_backend.checkpoint.tensor_source import InMemoryTensors, SourceWrapper
from support.tiny_checkpoints import Tensors


class CountingTensors(SourceWrapper):
    """Tensors in memory; `elements_read` holds how many elements of each were asked for."""

    def __init__(self, tensors: Tensors) -> None:
        self.source = InMemoryTensors(tensors)
        self.elements_read: Counter[str] = Counter()

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = self.source.read(name, dim, start, stop)
        self.elements_read[name] += tensor.numel()
        return tensor
