"""The times of steps of any shape, by what was measured of some (`types.step_costs`): seconds of J shapes at once."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kimi_backend.types.plan import RowPlan
from kimi_backend.types.step_costs import Grid, StepCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Numbers = float | Floats
"""One, or J."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The values that the time of a decode step depends on."""

    num_seqs: int
    num_rows: int
    longest: int
    """Most rows of one sequence."""
    num_context_tokens: int
    """Context tokens of all sequences together."""
    num_proposals: int = 0
    """Proposals of a draft's step: the most of one sequence."""

    @classmethod
    def of(cls, rows: RowPlan, num_proposals: int = 0) -> "StepShape":
        """The shape of a plan's rows."""
        lens = rows.query_lens
        return cls(len(lens), int(lens.sum()), int(lens.max()), int(rows.seq_lens.sum()), num_proposals)


class StepTimes:
    """One model's steps."""

    def __init__(self, costs: StepCosts) -> None:
        self._query_lens = np.array(costs.query_lens, np.float64)
        self._is_captured, self._context_len = costs.is_captured, costs.context_len
        # By every number of sequences from 0 on, so that a shape is looked up and not worked out.
        self._step = _by_num_seqs(costs, costs.step_us)
        self._padding = _by_num_seqs(costs, tuple(_padding_us(costs)))
        self._context, self._row_context = _by_num_seqs(
            costs, tuple(zip(costs.context_us, costs.row_context_us, strict=True))
        ).T
        none = tuple((0.0,) for _ in costs.num_seqs)
        self._proposals = _by_num_seqs(costs, costs.proposals_us or none)
        # By whole rows a sequence, the place of the next larger number in `query_lens`.
        longest = np.arange(int(self._query_lens[-1]) + 1)
        self._right = np.clip(np.searchsorted(self._query_lens, longest, side="right"), 1, len(self._query_lens) - 1)

    def parts(
        self, num_seqs: int | Ints, num_rows: Numbers | Ints, longest: int | Ints, num_context_tokens: Numbers
    ) -> tuple[Floats, Floats]:
        """(what a step takes with one row a sequence, what its other rows add), [J] each."""
        size, times = self._size(num_seqs)
        per_seq = np.minimum(num_rows / (times * size), self._query_lens[-1])
        right = self._right[np.minimum(per_seq.astype(np.int64), len(self._right) - 1)]
        left_len, right_len = self._query_lens[right - 1], self._query_lens[right]
        share = (per_seq - left_len) / (right_len - left_len)
        base, left = self._step[size, 0], self._step[size, right - 1]
        whole = left + share * (self._step[size, right] - left)
        further = self._further_tokens(size, times, num_context_tokens)
        fixed = base + self._context[size] * further
        if self._is_captured:
            bucket = np.minimum(np.searchsorted(self._query_lens, longest), len(self._query_lens) - 1)
            bucket_len = np.maximum(self._query_lens[bucket], 1.5)  # one of 1 has no padding
            # With all rows live nothing is padding.
            fixed = fixed + self._padding[size, bucket] * (bucket_len - per_seq) / (bucket_len - 1)
        return times * fixed, times * (whole - base + self._row_context[size] * further * (per_seq - 1))

    def proposals(self, num_seqs: int | Ints, depth: int | Ints, num_context_tokens: Numbers) -> Floats:
        """[J] what drawing `depth` proposals adds to a draft's step; 0 for none."""
        size, times = self._size(num_seqs)
        last = np.clip(np.asarray(depth) - 1, 0, self._proposals.shape[1] - 1)
        further = self._further_tokens(size, times, num_context_tokens)
        drawn = self._proposals[size, last] + last * self._context[size] * further
        found: Floats = times * drawn * (np.asarray(depth) > 0)
        return found

    def _further_tokens(self, size: Ints, times: Floats, num_context_tokens: Numbers) -> Floats:
        """Return the keys beyond those of the measured context."""
        further: Floats = np.maximum(num_context_tokens / times - size * self._context_len, 0)
        return further

    def _size(self, num_seqs: int | Ints) -> tuple[Ints, Floats]:
        """(a number of sequences in the table, how many times as many there are): 1 but where it has too few."""
        wanted = np.maximum(np.atleast_1d(num_seqs), 1)
        size = np.minimum(wanted, len(self._step) - 1)
        return size, wanted / size


def _by_num_seqs(costs: StepCosts, grid: Grid) -> Floats:
    """[largest size + 1, columns] seconds, a straight line between any two sizes that were measured."""
    sizes, values = np.array(costs.num_seqs), 1e-6 * np.array(grid, np.float64)
    numbers = np.arange(sizes[-1] + 1)
    return np.stack([np.interp(numbers, sizes, column) for column in values.T], axis=1)


def _padding_us(costs: StepCosts) -> Iterator[tuple[float, ...]]:
    """[n, q] what a captured step takes longer than its live rows need, if each sequence has one."""
    lens = np.array(costs.query_lens, np.float64)
    for size, step, padded in zip(costs.num_seqs, costs.step_us, costs.padded_us, strict=True):
        live = (size - 1 + lens) / size  # rows of a sequence, on the average
        more = np.maximum(np.array(padded) - np.interp(live, lens, step), 0.0)
        yield tuple((more * (lens - 1) / np.maximum(lens - live, 1e-9) * (live < lens)).tolist())
