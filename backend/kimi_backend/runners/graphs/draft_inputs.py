"""A draft step's plan as the static arrays of two buckets, padding included: of its extension, and of its proposals.

What depends on the tokens that the verify drew and accepted is worked out on the device (`kimi_kernels.token_table`).
"""

import numpy as np

from kimi_backend.runners.graphs.buckets import Bucket
from kimi_backend.runners.graphs.parts import Parts
from kimi_backend.runners.graphs.static_arrays import ArrayLayout, HostArrays
from kimi_backend.runners.graphs.target_inputs import SAMPLING_SPECS, fill_sampling, pad_sampling
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import DraftPlan
from kimi_kernels.token_table import stamp_of


def extension_layout(bucket: Bucket) -> ArrayLayout:
    """T rows, B sequences, N parts as attention takes them."""
    rows, seqs = (bucket.num_rows,), (bucket.num_seqs,)
    return ArrayLayout.of(
        {
            "token_ids": (rows, np.int32),
            "positions": (rows, np.int64),
            "slots": (rows, np.int64),
            "aux_rows": (rows, np.int64),
            "cu_seqlens": ((bucket.num_seqs + 1,), np.int32),
            "last_rows": (seqs, np.int64),
            "sequence": (rows, np.int64),
            "num_drawn": (seqs, np.int32),
            "table_rows": (seqs, np.int64),
            "part_cu_seqlens": ((bucket.num_parts + 1,), np.int32),
            "seq_lens": ((bucket.num_parts,), np.int32),
        }
    )


def pad_extension(arrays: HostArrays, num_rows: int, num_seqs: int, num_parts: int, padding_row: int) -> None:
    """Everything from row `num_rows`, sequence `num_seqs` and part `num_parts` on: rows that write nothing, parts
    without a key.

    Args:
        num_rows, num_seqs, num_parts: of the plan.
        padding_row: of the token table.
    """
    arrays["cu_seqlens"][0] = arrays["part_cu_seqlens"][0] = 0
    if num_rows < len(arrays["token_ids"]):
        for name in ("token_ids", "positions", "aux_rows"):
            arrays[name][num_rows:] = 0
        arrays["slots"][num_rows:] = -1
        arrays["sequence"][num_rows:] = len(arrays["table_rows"]) - 1
    if num_seqs < len(arrays["table_rows"]):
        arrays["cu_seqlens"][num_seqs + 1 :] = num_rows
        arrays["table_rows"][num_seqs:] = padding_row
        arrays["num_drawn"][num_seqs:] = 0
    if num_parts < len(arrays["seq_lens"]):
        arrays["part_cu_seqlens"][num_parts + 1 :] = num_rows
        arrays["seq_lens"][num_parts:] = 0


def fill_extension(
    arrays: HostArrays, plan: DraftPlan, rows: RowArrays, parts: Parts, first_aux_row: int, padding_row: int
) -> None:
    """Write a checked plan. Each sequence's last row is left to the device.

    Args:
        first_aux_row: where the region begins that the plan's `aux_rows` count from.
        padding_row: of the token table.
    """
    num_rows, num_seqs, num_parts = len(rows.sequence), len(rows.ends), len(parts.ends)
    arrays["token_ids"][:num_rows] = plan.rows.token_ids
    arrays["positions"][:num_rows] = rows.positions
    arrays["slots"][:num_rows] = rows.slots
    arrays["aux_rows"][:num_rows] = plan.aux_rows + first_aux_row
    arrays["cu_seqlens"][1 : num_seqs + 1] = rows.ends
    arrays["last_rows"][:] = 0
    arrays["sequence"][:num_rows] = rows.sequence
    arrays["num_drawn"][:num_seqs] = plan.num_drawn
    arrays["table_rows"][:num_seqs] = plan.table_rows
    arrays["part_cu_seqlens"][1 : num_parts + 1] = parts.ends
    arrays["seq_lens"][:num_parts] = parts.seq_lens
    pad_extension(arrays, num_rows, num_seqs, num_parts, padding_row)


def proposal_layout(bucket: Bucket) -> ArrayLayout:
    """B sequences, k proposals with k - 1 single-row steps between them."""
    seqs, steps = (bucket.num_seqs,), (bucket.num_proposals - 1, bucket.num_seqs)
    return ArrayLayout.of(
        {
            "seq_lens": (steps, np.int32),
            "positions": (steps, np.int64),
            "slots": (steps, np.int64),
            "token_index": ((bucket.num_proposals, bucket.num_seqs), np.int64),
            "is_wanted": ((bucket.num_proposals, bucket.num_seqs), np.int32),
            "counts": ((bucket.num_proposals, bucket.num_seqs), np.int32),
            **dict.fromkeys(("first_len", "first_index", "most", "room", "table_rows"), (seqs, np.int64)),
            "num_drawn": (seqs, np.int32),
            "stamp": ((1,), np.int32),
            **{name: (seqs, dtype) for name, (dtype, _) in SAMPLING_SPECS.items()},
        }
    )


def pad_proposals(arrays: HostArrays, num_seqs: int, padding_row: int) -> None:
    """Sequences from `num_seqs` on: they write nothing and have no key. padding_row: of the token table."""
    for name in ("first_len", "first_index", "most", "room", "num_drawn"):
        arrays[name][num_seqs:] = 0
    arrays["table_rows"][num_seqs:] = padding_row
    pad_sampling(arrays, num_seqs)


def fill_proposals(arrays: HostArrays, plan: DraftPlan, padding_row: int) -> None:
    """Write a checked plan, all its sequences. Lengths, positions, slots and indices are left to the device.

    A sequence that wants fewer proposals, or none, stays in the batch: its further rows write nothing, see only slots
    that it owns, and what they draw is dropped.
    """
    num_seqs = len(plan.num_proposals)
    arrays["first_len"][:num_seqs] = plan.rows.seq_lens - np.maximum(plan.num_drawn - 1, 0)
    arrays["first_index"][:num_seqs] = 0
    arrays["first_index"][:num_seqs][plan.num_proposals > 0] = plan.output_index
    arrays["most"][:num_seqs] = plan.num_proposals
    arrays["room"][:num_seqs] = plan.room
    arrays["num_drawn"][:num_seqs] = plan.num_drawn
    arrays["table_rows"][:num_seqs] = plan.table_rows
    arrays["stamp"][0] = stamp_of(plan.step_id)
    pad_proposals(arrays, num_seqs, padding_row)
    fill_steps_sampling(arrays, plan)


def fill_steps_sampling(arrays: HostArrays, plan: DraftPlan) -> None:
    """Parameters of the draws, of padded sequences too."""
    num_seqs, proposing = len(plan.num_proposals), np.flatnonzero(plan.num_proposals)
    pad_sampling(arrays, num_seqs if len(proposing) == num_seqs else 0)
    fill_sampling(arrays, plan.sampling, proposing)
