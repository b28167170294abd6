"""The shapes of steps that are captured, and which of them a step takes.

A graph has fixed shapes, so a step runs in the smallest bucket that holds it. Rows are packed: a bucket of B sequences
times q rows takes any step of at most B sequences, at most q rows each. A prompt's bucket takes chunks of any length,
since attention gets them cut into parts (`parts`). What is left over is padding, which costs little as long as a
bucket's neighbours are near: padded rows read no expert and no key.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from kimi_backend.config.step_memory import most_prompt_rows, part_rows

FEWEST_PROMPT_ROWS = 16


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Bucket:
    """Shape of a captured step. Ordered by what it costs."""

    cuts_chunks: bool = False
    """Any chunk fits, since attention gets parts of at most `query_len` rows."""
    num_rows: int
    num_seqs: int
    query_len: int
    """Most rows of one sequence, or of one part."""
    num_proposals: int = 0
    """The tokens that a draft's single-row steps draw for each sequence."""

    @classmethod
    def of(cls, num_seqs: int, query_len: int, num_proposals: int = 0) -> "Bucket":
        return cls(num_rows=num_seqs * query_len, num_seqs=num_seqs, query_len=query_len, num_proposals=num_proposals)

    @property
    def num_parts(self) -> int:
        """Runs of rows as attention takes them: sequences, or their parts."""
        return self.num_seqs + self.num_rows // self.query_len if self.cuts_chunks else self.num_seqs


def batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, ...: a third of a bucket is the most that is wasted."""
    sizes, power = {max_num_seqs}, 1
    while power <= max_num_seqs:
        sizes |= {size for size in (power, power + power // 2) if size <= max_num_seqs}
        power *= 2
    return sorted(sizes)


def query_lens(longest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, up to the rows of a verify with the most draft tokens."""
    return sorted({length for length in (1, 2, 3, 4, 6, 8) if length < longest} | {longest})


def chosen_batch_sizes(max_num_seqs: int, chosen: tuple[int, ...]) -> list[int]:
    """Those that were chosen, with the largest there is; all of `batch_sizes` where nothing was."""
    if not chosen:
        return batch_sizes(max_num_seqs)
    return sorted({size for size in chosen if size < max_num_seqs} | {max_num_seqs})


def row_buckets(sizes: Iterable[int], max_query_len: int, max_num_rows: int) -> list[Bucket]:
    """Shapes of a target's verify or a draft's extension, largest first: its memory serves the others too."""
    return _largest_first(
        Bucket.of(num_seqs, query_len)
        for num_seqs in sizes
        for query_len in query_lens(max_query_len)
        if num_seqs * query_len <= max_num_rows
    )


def prompt_buckets(max_num_seqs: int, max_num_rows: int, num_heads: int | None) -> list[Bucket]:
    """Shapes of steps with a chunk of a prompt, largest first.

    Args:
        max_num_seqs: of any step; a bucket takes as many.
        max_num_rows: of any step.
        num_heads: see `part_rows`.
    """
    most = most_prompt_rows(max_num_rows, num_heads)
    return _largest_first(
        Bucket(cuts_chunks=True, num_rows=num_rows, num_seqs=max_num_seqs, query_len=part_rows(num_heads))
        for num_rows in batch_sizes(most)
        if num_rows >= FEWEST_PROMPT_ROWS
    )


def proposal_buckets(sizes: Iterable[int], max_num_proposals: int) -> list[Bucket]:
    """Shapes of the draft's single-row steps, largest first: every number of proposals, because one step too many costs
    as much as a step."""
    return _largest_first(
        Bucket.of(num_seqs, 1, num_proposals) for num_seqs in sizes for num_proposals in range(1, max_num_proposals + 1)
    )


class BucketChoice:
    """The cheapest of some buckets for a step. Remembers: a server sees few shapes, many times."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._smallest = functools.lru_cache(maxsize=4096)(functools.partial(smallest_fitting, tuple(buckets)))

    def smallest(self, num_seqs: int, query_len: int, num_rows: int, num_proposals: int = 0) -> Bucket | None:
        """See `smallest_fitting`."""
        return self._smallest(num_seqs, query_len, num_rows, num_proposals)


def smallest_fitting(
    buckets: Iterable[Bucket], num_seqs: int, query_len: int, num_rows: int, num_proposals: int = 0
) -> Bucket | None:
    """The cheapest bucket that holds a step; None when none does."""
    fitting = [
        bucket
        for bucket in buckets
        if bucket.num_seqs >= num_seqs
        and (bucket.cuts_chunks or bucket.query_len >= query_len)
        and bucket.num_rows >= num_rows
        and bucket.num_proposals == num_proposals
    ]
    return min(fitting, default=None)


def _largest_first(buckets: Iterable[Bucket]) -> list[Bucket]:
    return sorted(set(buckets), reverse=True)
