"""Chunks of prompts as captured steps attend to them: in parts, each a sequence of its own to the attention kernel.

A part's rows see the keys up to their own place, as a shorter sequence with the same blocks would. So the kernel of
decode rows takes them, which divides its work by lengths on the device; and no part waits for keys that only later rows
see. It takes the absorbed form of attention: for a few rows a key it is the cheaper one, since nothing is
up-projected; for many it multiplies more (`excess_products`).
"""

from dataclasses import dataclass

import numpy as np

from kimi_backend.runners.graphs.buckets import Bucket
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import Int32Array, Int64Array, RowPlan

EVEN_ROWS = 170
"""Rows of a chunk from which on up-projecting a key once costs less than the wider products of all its rows, with the
widths of Kimi-K2: 2 * 512 * 256 / (2 * (1,088 - 320))."""
MOST_EXCESS = 3 << 26
"""(Rows beyond `EVEN_ROWS`) * keys * heads of a captured step, with which it is about as fast as an eager one. With 512
rows over 65,000 keys (1.8e8) both take 1.8 ms a layer on an H200, which an eager one's kernels need by themselves.
Fewer keys are attended to sooner, where launching kernels one by one takes 1.5 to 3.5 ms a layer (one of 8 ranks)."""


@dataclass(frozen=True, slots=True)
class ChunkParts:
    """N parts of a step's S sequences, in the order of their rows."""

    sequence: Int64Array
    """[N] sequence of each part; empty where each is one."""
    ends: Int64Array
    """[N] one past each part's last row."""
    seq_lens: Int32Array
    """[N] keys that a part's last row sees."""

    @classmethod
    def of(cls, plan: RowPlan, rows: RowArrays, bucket: Bucket) -> "ChunkParts":
        """Cut a step as the bucket takes it: into sequences, unless it cuts chunks."""
        if not bucket.cuts_chunks:
            return cls(rows.sequence[:0], rows.ends, plan.seq_lens)
        counts = -(-plan.query_lens // bucket.query_len)
        sequence = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(sequence)) - (counts.cumsum() - counts)[sequence]
        left = np.maximum(plan.query_lens[sequence] - (number + 1) * bucket.query_len, 0)
        return cls(sequence, rows.ends[sequence] - left, (plan.seq_lens[sequence] - left).astype(np.int32))


def excess_products(rows: RowPlan, num_heads: int | None) -> int:
    """Count what the absorbed form multiplies more than the expanded one, in rows * keys * heads.

    Args:
        num_heads: of this rank; None where the attention is not MLA, and has one form.
    """
    if num_heads is None:
        return 0
    lens = rows.query_lens.astype(np.int64)
    keys = rows.seq_lens - lens // 2
    return int((np.maximum(lens - EVEN_ROWS, 0) * keys).sum()) * num_heads


def is_worth_cutting(rows: RowPlan, bucket: Bucket, num_heads: int | None) -> bool:
    """Return False for a step that takes longer in the bucket's parts than a host takes to launch it eagerly."""
    return not bucket.cuts_chunks or excess_products(rows, num_heads) <= MOST_EXCESS
