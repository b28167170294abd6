"""Tensor parallelism as layers see it: a rank, a size, and three collectives."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from kimi_kernels.collectives.op import AllReduceNorm, Collective

# torch 2.13 renames it, and warns of the old name.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class TensorParallelGroup(Protocol):
    """The ranks that share one model. Every rank calls the same collectives in the same order, from one stream.

    Each returns the same bits on every rank: ranks draw tokens from them without asking one another.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def all_reduce_norm(self) -> AllReduceNorm | None:
        """None where `all_reduce` and a norm of its own do."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may overwrite x."""
        ...

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, columns] of each rank -> [rows, size * columns] in rank order."""
        ...

    def all_argmax(self, values: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row the largest value over ranks and its token id, the lowest id among equals.

        Args:
            values: [rows] float of up to 32 bits.
            token_ids: [rows] int64 below 2**53, this rank's best (global ids).
        Returns:
            Both [rows], as given; the value is NaN and the id meaningless where a rank's value is NaN.
        """
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """No parallelism: every collective is the identity."""

    rank: int = 0
    size: int = 1
    all_reduce_norm: None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_argmax(self, values: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return values, token_ids


@dataclass(frozen=True, slots=True)
class DistributedRanks:
    """Ranks of a torch.distributed process group (gloo on CPU, NCCL on GPUs).

    No collective waits for the device, so a step that calls them can be captured as a CUDA graph.
    """

    group: dist.ProcessGroup
    fast_all_reduce: Collective | None = None
    """Sums what it takes; the process group sums the rest."""
    fast_all_gather: Collective | None = None
    """Gathers columns likewise."""
    all_reduce_norm: AllReduceNorm | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.fast_all_reduce is not None and self.fast_all_reduce.takes(x):
            return self.fast_all_reduce(x)
        if x.is_cuda:
            x = x.contiguous()
            dist.all_reduce(x, group=self.group)
            return x
        # In rank order: gloo's order differs from one end of a tensor to the other, so that a row's sum would depend on
        # the rows beside it.
        terms = self._gather(x)
        total = terms[0]
        for rank in range(1, self.size):
            total = total + terms[rank]
        return total

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        if self.fast_all_gather is not None and self.fast_all_gather.takes(x):
            return self.fast_all_gather(x)
        rows, columns = x.shape
        return self._gather(x).transpose(0, 1).reshape(rows, self.size * columns)

    def all_argmax(self, values: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # One exchange for both: a float64 holds a float32 and an id exactly.
        pairs = self._gather(torch.stack([values.double(), token_ids.double()]))
        all_values, all_ids = pairs[:, 0], pairs[:, 1]
        best = all_values.amax(dim=0)
        lowest = all_ids.masked_fill(all_values != best, 2.0**53).amin(dim=0)
        return best.to(values.dtype), lowest.to(token_ids.dtype)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape] in rank order."""
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        _all_gather(out.flatten(0, 1), x.contiguous(), group=self.group)
        return out
