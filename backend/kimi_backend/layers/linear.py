"""Linear layers over a kernel set, whole on every rank or divided among the ranks of a group."""

from collections.abc import Sequence

import torch

from kimi_backend.layers.weight_loader import Shard, WeightLoader
from kimi_backend.parallel import TensorParallelGroup
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.weights import PackedWeight

Shape = tuple[int, int]


class ReplicatedLinear:
    """x @ weight.T + bias, the same on every rank."""

    def __init__(self, weight: torch.Tensor, kernels: KernelSet, bias: torch.Tensor | None = None) -> None:
        """weight: [out_features, in_features], bias: [out_features], of this rank."""
        self._kernels = kernels
        self._weight = kernels.pack_linear(weight)
        self._bias = bias

    @classmethod
    def load(cls, loader: WeightLoader, parts: Sequence[tuple[str, Shape]]) -> "ReplicatedLinear":
        """parts: (name, [out_features, in_features]) of matrices to stack."""
        whole = [(name, shape, Shard.NONE) for name, shape in parts]
        return cls(loader.stacked(whole), loader.kernels, loader.stacked_bias(whole))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features] -> [T, out_features]."""
        out = self._kernels.linear(x, self._weight)
        return out if self._bias is None else out + self._bias


class ColumnParallelLinear:
    """x @ weight.T + bias where each rank computes its slice of the output columns."""

    def __init__(
        self, weight: torch.Tensor, kernels: KernelSet, group: TensorParallelGroup, bias: torch.Tensor | None = None
    ) -> None:
        """weight: [out_features of this rank, in_features], bias: [out_features of this rank]."""
        self._kernels = kernels
        self._group = group
        self._weight = kernels.pack_linear(weight)
        self._bias = bias

    @classmethod
    def load(cls, loader: WeightLoader, parts: Sequence[tuple[str, Shape]]) -> "ColumnParallelLinear":
        """parts: (name, shape of the whole matrix); this rank stacks its slice of each."""
        slices = [(name, shape, Shard.ROWS) for name, shape in parts]
        return cls(loader.stacked(slices), loader.kernels, loader.group, loader.stacked_bias(slices))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features] -> [T, out_features of this rank]."""
        out = self._kernels.linear(x, self._weight)
        return out if self._bias is None else out + self._bias

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features] -> [T, out_features] on every rank. Only for a layer of one part."""
        return self._group.all_gather_columns(self(x))


class RowParallelLinear:
    """x @ weight.T + bias where each rank holds a slice of the input columns; the ranks' results are summed."""

    def __init__(
        self, weight: torch.Tensor, kernels: KernelSet, group: TensorParallelGroup, bias: torch.Tensor | None = None
    ) -> None:
        """weight: [out_features, in_features of this rank], bias: [out_features], of one rank only."""
        self._kernels = kernels
        self._group = group
        self._weight = kernels.pack_linear(weight)
        self._bias = bias

    @classmethod
    def load(cls, loader: WeightLoader, name: str, shape: Shape) -> "RowParallelLinear":
        bias = loader.bias(name, shape[0], Shard.COLUMNS)
        return cls(loader.matrix(name, shape, Shard.COLUMNS), loader.kernels, loader.group, bias)

    @property
    def weight(self) -> PackedWeight:
        """This rank's part, for an op that has it fetched ahead."""
        return self._weight

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's term of the sum, for a caller that sums several layers' terms at once."""
        out = self._kernels.linear(x, self._weight)
        return out if self._bias is None else out + self._bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features of this rank] -> [T, out_features] on every rank."""
        return self._group.all_reduce(self.partial(x))
