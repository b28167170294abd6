"""The collectives' contracts.

Every rank makes the same calls in the same order, one at a time. Dtype and shape, the same on every rank, say which
tensors a collective takes; the results have the same bits on every rank.
"""

from typing import Protocol

from torch import Tensor

from kimi_kernels.argument_checks import require_columns, require_dtype, require_shape
from kimi_kernels.moe_experts.op import Terms


class Collective(Protocol):
    """An all-reduce, or an all-gather of columns, for some tensors."""

    def takes(self, x: Tensor) -> bool:
        """The same on every rank."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Collect x, which `takes` accepts.

        An all-reduce: x of any shape -> the sum over ranks, of x's dtype and shape, rounded once. A gather: [rows,
        columns] -> [rows, size * columns] in rank order; bits as they were, but that a NaN may be another one.
        """
        ...


class AllReduceNorm(Protocol):
    """A sum over ranks, added to the residual stream, and the norm of that, in one kernel, for some tensors."""

    def takes(self, x: Terms) -> bool:
        """The same on every rank."""
        ...

    def __call__(
        self, x: Terms, residual: Tensor, weight: Tensor, eps: float, second: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Do an all-reduce, then `kimi_kernels.rms_norm.op.AddRmsNorm`; a row's squares may be added in another order.

        Args:
            x, residual: [T, H], of residual the columns contiguous. weight: [H].
            second: [T, H] of x's dtype; x + second is this rank's term in place of x.
        Returns:
            (normed, residual + the sum), [T, H] each.
        Raises:
            ValueError: shapes or dtypes do not fit.
        """
        ...


def check_all_reduce_norm(x: Terms, residual: Tensor, weight: Tensor, second: Tensor | None) -> None:
    """Raise unless the arguments are those of `AllReduceNorm`."""
    require_shape("residual", residual, *x.shape)
    require_columns("residual", residual)
    require_shape("weight", weight, x.shape[1])
    if second is not None:
        require_shape("second", second, *x.shape)
        require_dtype("second", second, x.dtype)
