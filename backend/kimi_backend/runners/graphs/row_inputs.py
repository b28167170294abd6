"""The static arrays that steps of both models have: of rows, sequences and parts of a plan, and the padding behind."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kimi_backend.runners.graphs.buckets import Bucket
from kimi_backend.runners.graphs.chunk_parts import ChunkParts
from kimi_backend.runners.graphs.static_arrays import HostArrays, Shape
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import DraftPlan, TargetPlan


def row_specs(bucket: Bucket) -> dict[str, tuple[Shape, npt.DTypeLike]]:
    """T rows, B sequences, N parts as attention takes them: name -> (shape, dtype)."""
    rows, seqs = (bucket.num_rows,), (bucket.num_seqs,)
    specs: dict[str, tuple[Shape, Any]] = {
        "token_ids": (rows, np.int32),
        "positions": (rows, np.int64),
        "slots": (rows, np.int64),
        "aux_rows": (rows, np.int64),
        "sequence": (rows, np.int64),
        "cu_seqlens": ((bucket.num_seqs + 1,), np.int32),
        "table_rows": (seqs, np.int64),
        "part_cu_seqlens": ((bucket.num_parts + 1,), np.int32),
        "seq_lens": ((bucket.num_parts,), np.int32),
    }
    return specs


def fill_rows(arrays: HostArrays, plan: TargetPlan | DraftPlan, rows: RowArrays, parts: ChunkParts) -> None:
    """Write a checked plan into the arrays of `row_specs`, but for `aux_rows`."""
    num_rows, num_seqs, num_parts = len(rows.sequence), len(rows.ends), len(parts.ends)
    arrays["token_ids"][:num_rows] = plan.rows.token_ids
    arrays["positions"][:num_rows] = rows.positions
    arrays["slots"][:num_rows] = rows.slots
    arrays["sequence"][:num_rows] = rows.sequence
    arrays["cu_seqlens"][1 : num_seqs + 1] = rows.ends
    arrays["table_rows"][:num_seqs] = plan.table_rows
    arrays["part_cu_seqlens"][1 : num_parts + 1] = parts.ends
    arrays["seq_lens"][:num_parts] = parts.seq_lens


def pad_rows(
    arrays: HostArrays,
    num_rows: int,
    num_seqs: int,
    num_parts: int,
    padding_row: int,
    *,
    by_row: tuple[str, ...] = (),
    by_sequence: tuple[str, ...] = (),
) -> None:
    """Everything from row `num_rows`, sequence `num_seqs` and part `num_parts` on: rows that write nothing, parts
    without a key.

    Args:
        num_rows, num_seqs, num_parts: of the plan.
        padding_row: of the token table.
        by_row, by_sequence: further arrays that are 0 there.
    """
    arrays["cu_seqlens"][0] = arrays["part_cu_seqlens"][0] = 0
    if num_rows < len(arrays["token_ids"]):
        for name in ("token_ids", "positions", *by_row):
            arrays[name][num_rows:] = 0
        arrays["slots"][num_rows:] = -1
        arrays["sequence"][num_rows:] = len(arrays["table_rows"]) - 1
    if num_seqs < len(arrays["table_rows"]):
        arrays["cu_seqlens"][num_seqs + 1 :] = num_rows
        arrays["table_rows"][num_seqs:] = padding_row
        for name in by_sequence:
            arrays[name][num_seqs:] = 0
    if num_parts < len(arrays["seq_lens"]):
        arrays["part_cu_seqlens"][num_parts + 1 :] = num_rows
        arrays["seq_lens"][num_parts:] = 0
