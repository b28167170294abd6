"""The rows of a captured target step that draw: those that its plan samples, and of a sequence that samples none the
last, whose draw says whether its hidden states are finite and is dropped."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import Int32Array, Int64Array, TargetPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """R rows of S sequences; a sequence's rows stand together, in order."""

    counts: Int32Array
    """[S] rows that draw, at least one."""
    most: int
    """Rows of the sequence with the most."""
    first: Int64Array
    """[S] index of a sequence's first row among the R."""
    are_wanted: npt.NDArray[np.bool_] | None
    """[S] the plan samples these; None where it samples all."""
    rows: Int64Array
    """[R] row of the step."""
    sequence: Int64Array
    """[R] sequence of each row."""
    place: Int64Array
    """[R] draft tokens of its sequence that stand before the draw."""
    token_index: Int64Array
    """[R] index of the token drawn: one past the row's position."""

    @classmethod
    def of(cls, plan: TargetPlan, rows: RowArrays) -> "Draws":
        """Find them from a checked plan and its rows."""
        counts = plan.num_sampled_rows
        are_wanted = None if counts.all() else counts > 0
        if are_wanted is not None:
            counts = np.maximum(counts, 1)
        ends = counts.cumsum(dtype=np.int64)
        first = ends - counts
        num_rows = int(ends[-1])
        if num_rows == len(rows.sequence):  # every row draws, as where nobody prefills
            sequence, drawn = rows.sequence, np.arange(num_rows)
            place, token_index = drawn - first[sequence], rows.positions + 1
        else:
            sequence = np.repeat(np.arange(len(counts)), counts)
            place = np.arange(num_rows) - first[sequence]
            drawn = (rows.ends - counts)[sequence] + place
            token_index = rows.positions[drawn] + 1
        return cls(
            counts=counts,
            most=int(counts.max()),
            first=first,
            are_wanted=are_wanted,
            rows=drawn,
            sequence=sequence,
            place=place,
            token_index=token_index,
        )

    def indices(self, sampled_rows: Int32Array) -> Int32Array:
        """Among the R, the rows that a plan counts among those that it samples."""
        if self.are_wanted is None:
            return sampled_rows
        return np.flatnonzero(self.are_wanted[self.sequence])[sampled_rows].astype(np.int32)
