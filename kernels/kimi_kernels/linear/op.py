"""The linear layers' contracts. T tokens of the step, N heads."""

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from kimi_kernels.argument_checks import refuse, require_float, require_shape
from kimi_kernels.weights import LinearWeight, PackedWeight


class PackLinear(Protocol):
    """Lay a linear layer's weight out for `Linear`, at load."""

    def __call__(self, weight: LinearWeight) -> PackedWeight:
        """weight: [out_features, in_features]."""
        ...


class Linear(Protocol):
    """x @ weight.T."""

    def __call__(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """x: [T, in_features], of any strides -> [T, out_features], contiguous."""
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


def check_linear(x: Tensor, weight: PackedWeight, kinds: Collection[str]) -> None:
    """Raise unless x is [T, in_features] of floats, for a weight packed as one of `kinds`."""
    if weight.kind not in kinds:
        refuse("weight", f"a weight packed as {weight.kind!r}", f"one of {sorted(kinds)}")
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        require_shape("x", x, None, weight.in_features)
    require_float("x", x)


def check_heads(x: Tensor, weight: Tensor) -> None:
    """Raise unless x is [T, N, in_features] of floats, for a weight [N, in_features, out_features] of floats."""
    if weight.dim() != 3:
        require_shape("weight", weight, None, None, None)
    if x.shape[1:] != weight.shape[:2]:
        require_shape("x", x, None, *weight.shape[:2])
    require_float("x", x)
    require_float("weight", weight)
