"""A draft step's plan as the static arrays of a bucket, padding included."""

import numpy as np

from kimi_backend.runners.graphs.buckets import Bucket
from kimi_backend.runners.graphs.static_arrays import ArrayLayout, HostArrays
from kimi_backend.runners.graphs.target_inputs import SAMPLING_SPECS, fill_sampling, pad_sampling
from kimi_backend.runners.row_arrays import RowArrays, slots_of
from kimi_backend.types.plan import DraftPlan


def draft_layout(bucket: Bucket) -> ArrayLayout:
    """T rows of the extension, B sequences, k proposals with k - 1 single-row steps between them."""
    rows, seqs = (bucket.num_rows,), (bucket.num_seqs,)
    steps = (bucket.num_proposals - 1, bucket.num_seqs)
    return ArrayLayout.of(
        {
            "token_ids": (rows, np.int32),
            "positions": (rows, np.int64),
            "slots": (rows, np.int64),
            "aux_rows": (rows, np.int64),
            "cu_seqlens": ((bucket.num_seqs + 1,), np.int32),
            "seq_lens": (seqs, np.int32),
            "last_rows": (seqs, np.int64),
            "step_seq_lens": (steps, np.int32),
            "step_positions": (steps, np.int64),
            "step_slots": (steps, np.int64),
            "token_index": ((bucket.num_proposals, bucket.num_seqs), np.int64),
            **{name: (seqs, dtype) for name, (dtype, _) in SAMPLING_SPECS.items()},
        }
    )


def pad_draft(arrays: HostArrays, num_rows: int, num_seqs: int) -> None:
    """Everything from row `num_rows` and sequence `num_seqs` on: rows that write nothing, sequences without a key."""
    for name in ("token_ids", "positions", "aux_rows"):
        arrays[name][num_rows:] = 0
    arrays["slots"][num_rows:] = -1
    arrays["cu_seqlens"][num_seqs + 1 :] = num_rows
    for name in ("seq_lens", "last_rows"):
        arrays[name][num_seqs:] = 0
    for name in ("step_seq_lens", "step_positions", "token_index"):
        arrays[name][:, num_seqs:] = 0
    arrays["step_slots"][:, num_seqs:] = -1
    pad_sampling(arrays, num_seqs)


def fill_draft(arrays: HostArrays, plan: DraftPlan, rows: RowArrays, block_size: int, first_aux_row: int) -> None:
    """Write a checked plan.

    A sequence that wants fewer proposals stays in the batch: its further rows write nothing, see only slots that it
    owns, and what they draw is dropped.

    Args:
        first_aux_row: where the region begins that the plan's `aux_rows` count from.
    """
    num_rows, num_seqs = len(rows.sequence), len(rows.ends)
    arrays["token_ids"][:num_rows] = plan.rows.token_ids
    arrays["positions"][:num_rows] = rows.positions
    arrays["slots"][:num_rows] = rows.slots
    arrays["aux_rows"][:num_rows] = plan.aux_rows + first_aux_row
    arrays["cu_seqlens"][0] = 0
    arrays["cu_seqlens"][1 : num_seqs + 1] = rows.ends
    arrays["seq_lens"][:num_seqs] = plan.rows.seq_lens
    arrays["last_rows"][:num_seqs] = rows.ends - 1
    _fill_steps(arrays, plan, block_size)
    proposing = np.flatnonzero(plan.num_proposals)
    first_index = plan.rows.seq_lens.astype(np.int64) + 1
    arrays["token_index"][:, :num_seqs] = first_index + np.arange(len(arrays["token_index"]))[:, None]
    arrays["temperature"][:num_seqs] = 0
    fill_sampling(arrays, plan.sampling, proposing)
    arrays["temperature"][proposing[plan.greedy]] = 0
    pad_draft(arrays, num_rows, num_seqs)


def _fill_steps(arrays: HostArrays, plan: DraftPlan, block_size: int) -> None:
    """Row `seq_len + step - 1` of each sequence, for step 1 to k - 1."""
    num_steps, num_seqs = len(arrays["step_slots"]), len(plan.num_proposals)
    if not num_steps:
        return
    step = np.arange(1, num_steps + 1)[:, None]
    seq_lens = plan.rows.seq_lens + np.minimum(step, np.maximum(plan.num_proposals - 1, 0))
    positions = seq_lens.astype(np.int64) - 1
    slots = slots_of(plan.rows.block_table, np.arange(num_seqs), positions, block_size)
    arrays["step_seq_lens"][:, :num_seqs] = seq_lens
    arrays["step_positions"][:, :num_seqs] = positions
    arrays["step_slots"][:, :num_seqs] = np.where(step < plan.num_proposals, slots, -1)
