"""The times of steps of any shape, by what was measured of some (`types.step_costs`): seconds."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kimi_backend.types.plan import RowPlan
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS
from kimi_backend.types.step_costs import Grid, StepCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Numbers = float | Floats
"""One, or of many shapes at once: arguments broadcast."""


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
    """One model's steps. Whatever is asked for, of one shape or of many at once, is looked up by whole numbers."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._most_rows = float(costs.query_lens[-1])
        self._tabulate(costs.num_seqs[-1])

    def _tabulate(self, most_seqs: int) -> None:
        """Make tables by every number of sequences up to so many."""
        costs, self._most_seqs = self._costs, most_seqs
        lens = np.array(costs.query_lens, np.float64)
        num_seqs = np.arange(most_seqs + 1)
        steps = _by_num_seqs(costs, costs.step_us, num_seqs)
        self._base = steps[:, 0].copy()
        # By whole rows of a sequence: the straight line on to the next of `query_lens`.
        numbers = np.arange(max(int(lens[-1]), MAX_SPECULATIVE_TOKENS + 1) + 1)
        self._width = len(numbers)
        left = np.clip(np.searchsorted(lens, numbers, side="right") - 1, 0, len(lens) - 2)
        rises = (np.diff(steps) / np.diff(lens))[:, left]
        self._rise, self._start = rises.ravel(), (steps[:, left] - lens[left] * rises).ravel()
        # By the most rows of one: what each row of a sequence that is not live adds.
        bucket = np.minimum(np.searchsorted(lens, numbers), len(lens) - 1)
        self._bucket_len = np.maximum(lens[bucket], 1.5)  # one of 1 has no padding
        padding = _by_num_seqs(costs, tuple(_padding_us(costs)), num_seqs)
        self._padding = (padding[:, bucket] / (self._bucket_len - 1)).ravel()
        # Of a token of context of each sequence beyond those that were measured.
        self._context, self._row_context = (
            1e-6 * num_seqs * np.interp(num_seqs, costs.num_seqs, us) for us in (costs.context_us, costs.row_context_us)
        )
        drawn = _by_num_seqs(costs, costs.proposals_us or ((0.0,),) * len(costs.num_seqs), num_seqs)
        last = np.minimum(np.arange(MAX_SPECULATIVE_TOKENS), drawn.shape[1] - 1)
        self._proposals = np.pad(drawn[:, last], ((0, 0), (1, 0)))

    def reach(self, num_seqs: int) -> None:
        """Let so many sequences be asked for."""
        if num_seqs > self._most_seqs:
            self._tabulate(2 * num_seqs)

    def fixed_and_variable(
        self, num_seqs: int | Ints, num_rows: Numbers | Ints, longest: int | Ints, context_len: float
    ) -> tuple[Numbers, Numbers]:
        """(what a step takes with one row a sequence, what its other rows add).

        Args:
            longest: most rows of one sequence.
            context_len: context tokens of each sequence, on the average.
        """
        per_seq = np.minimum(num_rows / num_seqs, self._most_rows)
        place = num_seqs * self._width
        line = place + per_seq.astype(np.int64)
        fixed = base = self._base[num_seqs]
        more = self._start[line] + self._rise[line] * per_seq - base
        further_len = context_len - self._costs.context_len
        if further_len > 0:
            fixed = base + further_len * self._context[num_seqs]
            more = more + further_len * self._row_context[num_seqs] * (per_seq - 1)
        if self._costs.is_captured:  # with all rows live nothing is padding
            fixed = fixed + self._padding[place + longest] * (self._bucket_len[longest] - per_seq)
        return fixed, more

    def proposals(self, num_seqs: int | Ints, depth: int | Ints, context_len: float) -> Numbers:
        """Return what drawing `depth` proposals adds to a draft's step; 0 for none."""
        drawn: Numbers = self._proposals[num_seqs, depth]
        further_len = context_len - self._costs.context_len
        if further_len > 0:
            drawn = drawn + _FURTHER_STEPS[depth] * (further_len * self._context[num_seqs])
        return drawn


_FURTHER_STEPS = np.maximum(np.arange(MAX_SPECULATIVE_TOKENS + 1) - 1, 0)
"""The single-row steps behind the first one that draw so many proposals."""


def _by_num_seqs(costs: StepCosts, grid: Grid, num_seqs: Ints) -> Floats:
    """[N, columns] seconds for each number of sequences: a straight line between any two sizes that were measured; more
    than the largest take as long each."""
    times = [np.interp(num_seqs, costs.num_seqs, column) for column in 1e-6 * np.array(grid, np.float64).T]
    found: Floats = np.stack(times, axis=1) * np.maximum(num_seqs / costs.num_seqs[-1], 1)[:, None]
    return found


def _padding_us(costs: StepCosts) -> Iterator[tuple[float, ...]]:
    """[n, q] what a captured step takes longer than its live rows need, if each sequence has one."""
    lens = np.array(costs.query_lens, np.float64)
    for size, step, padded in zip(costs.num_seqs, costs.step_us, costs.padded_us, strict=True):
        live = (size - 1 + lens) / size  # rows of a sequence, on the average
        more = np.maximum(np.array(padded) - np.interp(live, lens, step), 0.0)
        yield tuple((more * (lens - 1) / np.maximum(lens - live, 1e-9) * (live < lens)).tolist())
