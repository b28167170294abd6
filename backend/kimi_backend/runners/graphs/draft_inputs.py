"""A draft step's plan as the static arrays of two buckets, padding included: of its extension, and of its proposals.

What depends on the tokens that the verify drew and accepted is worked out on the device (`kimi_kernels.token_table`).
"""

import numpy as np

from kimi_backend.runners.graphs.buckets import Bucket
from kimi_backend.runners.graphs.chunk_parts import ChunkParts
from kimi_backend.runners.graphs.row_inputs import fill_rows, pad_rows, row_specs
from kimi_backend.runners.graphs.static_arrays import ArrayLayout, HostArrays
from kimi_backend.runners.graphs.target_inputs import SAMPLING_SPECS, fill_sampling, pad_sampling
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import DraftPlan
from kimi_kernels.token_table import stamp_of


def extension_layout(bucket: Bucket) -> ArrayLayout:
    """`row_specs`, and what the device works out of the verify's draws, of B sequences."""
    seqs = (bucket.num_seqs,)
    return ArrayLayout.of({**row_specs(bucket), "last_rows": (seqs, np.int64), "num_drawn": (seqs, np.int32)})


def pad_extension(arrays: HostArrays, num_rows: int, num_seqs: int, num_parts: int, padding_row: int) -> None:
    """See `pad_rows`."""
    pad_rows(arrays, num_rows, num_seqs, num_parts, padding_row, by_row=("aux_rows",), by_sequence=("num_drawn",))


def fill_extension(
    arrays: HostArrays, plan: DraftPlan, rows: RowArrays, parts: ChunkParts, first_aux_row: int, padding_row: int
) -> None:
    """Write a checked plan. Each sequence's last row is left to the device.

    Args:
        first_aux_row: where the region begins that the plan's `aux_rows` count from.
        padding_row: of the token table.
    """
    num_rows, num_seqs = len(rows.sequence), len(rows.ends)
    fill_rows(arrays, plan, rows, parts)
    arrays["aux_rows"][:num_rows] = plan.aux_rows + first_aux_row
    arrays["last_rows"][:] = 0
    arrays["num_drawn"][:num_seqs] = plan.num_drawn
    pad_extension(arrays, num_rows, num_seqs, len(parts.ends), padding_row)


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
