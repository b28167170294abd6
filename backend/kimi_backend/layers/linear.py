"""Linear layers over a kernel set, whole on every rank or divided among the ranks of a group."""

from collections.abc import Sequence

import torch

from kimi_backend.layers.weight_loader import Shard, WeightLoader
from kimi_backend.parallel import TensorParallelGroup
from kimi_kernels.kernel_set import KernelSet

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
    """x @ weight.T + bias where each rank holds a slice of the input columns; the ranks' results are terms of a sum,
    which the residual stream takes (`layers.residual`)."""

    def __init__(self, weight: torch.Tensor, kernels: KernelSet, bias: torch.Tensor | None = None) -> None:
        """weight: [out_features, in_features of this rank], bias: [out_features], of one rank only."""
        self._kernels = kernels
        self._weight = kernels.pack_linear(weight)
        self._bias = bias

    @classmethod
    def load(cls, loader: WeightLoader, name: str, shape: Shape) -> "RowParallelLinear":
        bias = loader.bias(name, shape[0], Shard.COLUMNS)
        return cls(loader.matrix(name, shape, Shard.COLUMNS), loader.kernels, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features of this rank] -> this rank's term of the sum, [T, out_features]."""
        return self._with_bias(self._kernels.linear(x, self._weight))

    def after_silu(self, gate_up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """silu(first half) * second half, and this layer.

        Args:
            gate_up: [T, 2 * in_features of this rank] of dtype, or float32.
        Returns:
            This rank's term of the sum, [T, out_features] of dtype.
        """
        return self._with_bias(self._kernels.silu_down(gate_up, self._weight, dtype))

    def _with_bias(self, out: torch.Tensor) -> torch.Tensor:
        return out if self._bias is None else out + self._bias
