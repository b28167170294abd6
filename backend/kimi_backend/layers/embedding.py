"""Token embedding and output head, both divided over the vocabulary."""

import torch

from kimi_backend.layers.weight_loader import Shard, WeightLoader
from kimi_backend.parallel import TensorParallelGroup
from kimi_kernels.kernel_set import KernelSet


class VocabParallelEmbedding:
    """Rows of a [vocab_size, hidden_size] table, of which each rank holds a slice."""

    def __init__(self, weight: torch.Tensor, group: TensorParallelGroup) -> None:
        """weight: [vocab_size / group.size, hidden_size], of this rank."""
        self.weight = weight
        self._group = group
        self._first_id = group.rank * weight.shape[0]

    @classmethod
    def load(cls, loader: WeightLoader, name: str, vocab_size: int, hidden_size: int) -> "VocabParallelEmbedding":
        return cls(loader.matrix(name, (vocab_size, hidden_size), Shard.ROWS), loader.group)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [T] int32 or int64, each in [0, vocab_size) -> [T, hidden_size]."""
        if self._group.size == 1:
            return self.weight[token_ids]
        local_ids = token_ids - self._first_id
        inside = local_ids.clamp(0, self.weight.shape[0] - 1)
        rows = torch.where((local_ids == inside)[:, None], self.weight[inside], 0)
        return self._group.all_reduce(rows)


class ParallelHead:
    """Hidden states -> logits, of which each rank computes a slice of the columns."""

    def __init__(
        self, weight: torch.Tensor, kernels: KernelSet, group: TensorParallelGroup, *, keeps_weight: bool = True
    ) -> None:
        """
        Args:
            weight: [vocab_size / group.size, hidden_size], of this rank.
            keeps_weight: false where the packed weight is all that is needed, as no one else shares this head.
        """
        self.weight = weight if keeps_weight else None
        self._kernels = kernels
        self._group = group
        self._packed = kernels.pack_linear(weight)
        self._first_column = group.rank * weight.shape[0]

    @classmethod
    def load(
        cls, loader: WeightLoader, name: str, vocab_size: int, hidden_size: int, *, keeps_weight: bool = True
    ) -> "ParallelHead":
        weight = loader.matrix(name, (vocab_size, hidden_size), Shard.ROWS)
        return cls(weight, loader.kernels, loader.group, keeps_weight=keeps_weight)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x: [R, hidden_size], normed -> [R, vocab_size] float32 on every rank."""
        return self._group.all_gather_columns(self._kernels.logits(x, self._packed))

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best column of each row, the lowest among equals, without gathering the logits.

        Returns:
            values: [R] float32, the largest logit; NaN where the row has one.
            columns: [R] int64; meaningless where the value is NaN.
        """
        logits = self._kernels.linear(x, self._packed)
        values, columns = logits.max(dim=1)  # the first of equal values
        return self._group.all_argmax(values.float(), columns + self._first_column)
