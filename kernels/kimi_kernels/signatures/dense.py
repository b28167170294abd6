"""Products, norms, activation and rotation: the ops of rows that need nothing but themselves.

Dimensions: T tokens of the step, N heads, H hidden, R the part of a head that is rotated.
"""

from typing import Protocol

import torch
from torch import Tensor

from kimi_kernels.choice_products import Terms
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


class RmsNorm(Protocol):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019)."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [T, H], may be strided between rows; weight: [H] -> [T, H]."""
        ...


class AddRmsNorm(Protocol):
    """Add to the residual stream, then norm the sum."""

    def __call__(
        self, x: Terms, residual: Tensor, weight: Tensor, eps: float, second: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            x, residual: [T, H]; of products of choices, x is their sum, rounded to their dtype.
            second: [T, H] of x's dtype; x + second, rounded to it, is added in place of x.
        Returns:
            (normed [T, H], x + residual [T, H]).
        """
        ...


class ConcatRmsNorm(Protocol):
    """[norm(a), norm(b)]: the doubled input of an EAGLE3 layer."""

    def __call__(self, a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor, eps: float) -> Tensor:
        """a: [T, Ha], b: [T, Hb] -> [T, Ha + Hb]."""
        ...


class ChunkedRmsNorm(Protocol):
    """Each of C equal chunks of a row gets its own norm: EAGLE3.1's `fc_norm`."""

    def __call__(self, x: Tensor, weights: Tensor, eps: float) -> Tensor:
        """x: [T, C * H], weights: [C, H] -> [T, C * H]."""
        ...


class SiluMul(Protocol):
    """silu(first half) * second half."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 * I] -> [T, I]."""
        ...


class SiluDown(Protocol):
    """A feed-forward layer's activation and second product."""

    def __call__(self, gate_up: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
        """
        Args:
            gate_up: [T, 2 * I] of dtype, or float32 that is rounded to it first; may be strided between rows.
            weight: [out_features, I], packed by `PackLinear`.
            dtype: of the result.
        Returns:
            silu(first half) * second half, rounded to dtype, @ weight.T: [T, out_features].
        """
        ...


class Rope(Protocol):
    """Rotate each head by its row's position (Su et al. 2021)."""

    def __call__(self, x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
        """
        Args:
            x: [T, N, R], may be strided.
            cos_sin: [max_positions, R] float32: cosines of the R / 2 frequencies, then their sines.
            positions: [T] int64.
            interleaved: pairs are (2i, 2i + 1) if true, (i, i + R / 2) if false. The result keeps the pairing.
        """
        ...
