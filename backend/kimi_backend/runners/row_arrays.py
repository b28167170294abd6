"""The places of a step's rows, made on the host: so a graph holds no kernel that makes them."""

from dataclasses import dataclass

import numpy as np

from kimi_backend.types.plan import Int32Array, Int64Array, RowPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RowArrays:
    """T rows of S sequences, packed."""

    sequence: Int64Array
    """[T] sequence of each row."""
    ends: Int64Array
    """[S] one past each sequence's last row."""
    positions: Int64Array
    """[T]"""
    slots: Int64Array
    """[T] cache row that each row writes."""

    @classmethod
    def of(cls, rows: RowPlan, block_size: int) -> "RowArrays":
        """Make them of a checked plan."""
        ends = np.cumsum(rows.query_lens, dtype=np.int64)
        sequence = np.repeat(np.arange(len(ends)), rows.query_lens)
        positions = np.arange(len(sequence)) + (rows.seq_lens - ends)[sequence]
        return cls(
            sequence=sequence,
            ends=ends,
            positions=positions,
            slots=slots_of(rows.block_table, sequence, positions, block_size),
        )


def slots_of(block_table: Int32Array, sequence: Int64Array, positions: Int64Array, block_size: int) -> Int64Array:
    """Cache rows of positions: [T] each."""
    blocks, offsets = np.divmod(positions, block_size)
    slots: Int64Array = block_table[sequence, blocks].astype(np.int64) * block_size + offsets
    return slots
