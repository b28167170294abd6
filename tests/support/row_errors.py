"""The bound of an op that rounds: on each row by itself, because one wrong row of many hardly moves the norm of all."""

from torch import Tensor
from torch.linalg import vector_norm


def worst_row_error(out: Tensor, expected: Tensor) -> float:
    """The largest norm(out - expected) / norm(expected) of a row, which is the last dimension.

    Infinite where a row of zeros is expected and another is given; NaN if anything is not a number.
    """
    assert out.shape == expected.shape
    if not out.numel():
        return 0.0
    out, expected = out.cpu().double(), expected.cpu().double()
    difference, size = vector_norm(out - expected, dim=-1), vector_norm(expected, dim=-1)
    return float((difference / size).where(size > 0, difference / 0.0).where(difference != 0, 0.0).amax())
