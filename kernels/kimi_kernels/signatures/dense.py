"""Products, norms, activation and rotation: the ops of rows that need nothing but themselves.

Dimensions: T tokens of the step, N heads, H hidden, R the part of a head that is rotated.
"""

from typing import Protocol

from torch import Tensor

from kimi_kernels.weights import LinearWeight, PackedWeight


class PackLinear(Protocol):
    """Lay a linear layer's weight out for `Linear`, at load."""

    def __call__(self, weight: LinearWeight) -> PackedWeight:
        """weight: [out_features, in_features]."""
        ...


class Linear(Protocol):
    """x @ weight.T."""

    def __call__(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """x: [T, in_features] -> [T, out_features]."""
        ...


class Logits(Protocol):
    """x @ weight.T in float32, of a router's gate or an output head: a choice of the largest may hang on bits that bf16
    does not have (at 16 to 32 its steps are 1/8)."""

    def __call__(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """x: [T, in_features]; weight: as the file stores it, packed by `PackLinear` -> [T, out_features] float32."""
        ...


class PerHeadLinear(Protocol):
    """One matrix a head: out[t, n] = x[t, n] @ weight[n]."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x: [T, N, in_features], may be strided; weight: [N, in_features, out_features] -> [T, N, out_features]."""
        ...
