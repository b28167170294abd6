"""The norms' contracts. T tokens of the step, H hidden."""

from typing import Protocol

from torch import Tensor

from kimi_kernels.argument_checks import refuse, require_columns, require_dtype, require_float, require_shape
from kimi_kernels.moe_experts.op import ExpertOutputs, Terms


class RmsNorm(Protocol):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019)."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [T, H], may be strided between rows; weight: [H] -> [T, H]."""
        ...


class AddRmsNorm(Protocol):
    """Add to the residual stream, then norm the sum as returned, rounded to the residual's dtype."""

    def __call__(
        self, x: Terms, residual: Tensor, weight: Tensor, eps: float, second: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            x, residual: [T, H]; of products of assignments, x is their sum, rounded to their dtype.
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


def check_norm(x: Tensor, weight: Tensor, name: str = "x", weight_name: str = "weight") -> None:
    """Raise unless x is [T, H] of floats, columns contiguous, for a weight [H], H at least 1."""
    if weight.dim() != 1:
        require_shape(weight_name, weight, None)
    check_rows(name, x, weight.numel())


def check_add(x: Terms, residual: Tensor, weight: Tensor, second: Tensor | None) -> None:
    """Raise unless x, residual and second are [T, H], columns contiguous, for a weight [H], second of x's dtype."""
    check_norm(x.outputs if isinstance(x, ExpertOutputs) else x, weight)
    if residual.shape != x.shape:
        require_shape("residual", residual, *x.shape)
    require_float("residual", residual)
    require_columns("residual", residual)
    if second is not None:
        require_shape("second", second, *x.shape)
        require_dtype("second", second, x.dtype)


def check_concat(a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> None:
    """Raise unless a and b have as many rows, and each fits its weight as in `check_norm`."""
    check_norm(a, a_weight, "a", "a_weight")
    check_norm(b, b_weight, "b", "b_weight")
    if a.shape[0] != b.shape[0]:
        require_shape("b", b, a.shape[0], b.shape[1])


def check_chunks(x: Tensor, weights: Tensor) -> None:
    """Raise unless x is [T, C * H] of floats, columns contiguous, for weights [C, H], C and H at least 1."""
    require_shape("weights", weights, None, None)
    if not weights.numel():
        refuse("weights", f"shape {list(weights.shape)}", "at least one chunk of one column")
    check_rows("x", x, weights.numel())


def check_rows(name: str, x: Tensor, width: int) -> None:
    """Raise unless x is [T, width] of floats, columns contiguous, width at least 1."""
    if x.dim() != 2 or x.shape[1] != width:
        require_shape(name, x, None, width)
    require_float(name, x)
    require_columns(name, x)
    if not width:
        refuse(name, "no columns", "at least one")
