"""The latent query's contract.

Dimensions: T tokens of the step, N heads, P qk_nope_head_dim, L kv_lora_rank, R qk_rope_head_dim.
"""

from typing import Protocol

from torch import Tensor

from kimi_kernels.argument_checks import refuse, require_columns, require_dtype, require_float, require_shape
from kimi_kernels.rope.op import check_rotation


class MlaQuery(Protocol):
    """A head's query for `MlaDecode`: its first part moved into the latent space, its second part rotated."""

    def __call__(
        self,
        q: Tensor,
        w_uk: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        interleaved: bool,
    ) -> Tensor:
        """
        Args:
            q: [T, N, P + R], may be strided but for its columns.
            w_uk: [N, P, L], contiguous, of the dtype of q.
            cos_sin, positions, interleaved: as in `Rope`, for the R columns.
        Returns:
            [T, N, L + R]: q_nope @ w_uk, then rotated q_pe.
        """
        ...


def check_query(q: Tensor, w_uk: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """Raise unless the arguments are those of `MlaQuery`."""
    require_shape("w_uk", w_uk, None, None, None)
    require_shape("q", q, None, w_uk.shape[0], None)
    require_float("q", q)
    require_dtype("w_uk", w_uk, q.dtype)
    require_columns("q", q)
    if not w_uk.is_contiguous():
        refuse("w_uk", f"strides {w_uk.stride()}", "a contiguous tensor")
    nope_dim = w_uk.shape[1]
    rope_dim = q.shape[2] - nope_dim
    if rope_dim <= 0 or rope_dim % 2:
        refuse("q", f"{q.shape[2]} columns", f"{nope_dim} and an even number more")
    check_rotation(cos_sin, rope_dim, positions, q.shape[0])
