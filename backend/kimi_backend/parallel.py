"""Tensor parallelism as layers see it: a rank, a size, and three collectives."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist


class TensorParallelGroup(Protocol):
    """The ranks that share one model. Every rank calls the same collectives in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may overwrite x."""
        ...

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, columns] of each rank -> [rows, size * columns] in rank order."""
        ...

    def all_argmax(self, values: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row the largest value over ranks and its token id, the lowest id among equals.

        values: [rows] float; token_ids: [rows] int64, this rank's best (global ids).
        """
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """No parallelism: every collective is the identity."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_argmax(self, values: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return values, token_ids


@dataclass(frozen=True, slots=True)
class DistributedRanks:
    """Ranks of a torch.distributed process group (gloo on CPU, NCCL on GPUs)."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def all_argmax(self, values: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        all_values = self.all_gather_columns(values[:, None])
        all_ids = self.all_gather_columns(token_ids[:, None])
        best = all_values.max(dim=1).values
        is_best = all_values == best[:, None]
        lowest = all_ids.masked_fill(~is_best, torch.iinfo(all_ids.dtype).max).min(dim=1).values
        return best, lowest
