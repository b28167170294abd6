"""A draft step's plan as the static arrays of two buckets, padding included: of its extension, and of its proposals."""

import numpy as np

from kimi_backend.runners.graphs.buckets import Bucket
from kimi_backend.runners.graphs.static_arrays import ArrayLayout, HostArrays
from kimi_backend.runners.graphs.target_inputs import SAMPLING_SPECS, fill_sampling, pad_sampling
from kimi_backend.runners.row_arrays import RowArrays, slots_of
from kimi_backend.types.plan import DraftPlan


def extension_layout(bucket: Bucket) -> ArrayLayout:
    """T rows, B sequences."""
    rows, seqs = (bucket.num_rows,), (bucket.num_seqs,)
    return ArrayLayout.of(
        {
            "token_ids": (rows, np.int32),
            "positions": (rows, np.int64),
            "slots": (rows, np.int64),
            "aux_rows": (rows, np.int64),
            "cu_seqlens": ((bucket.num_seqs + 1,), np.int32),
            "seq_lens": (seqs, np.int32),
            "last_rows": (seqs, np.int64),
            "drawn_rows": (seqs, np.int64),
            "drawn_places": (rows, np.int64),
        }
    )


def pad_extension(arrays: HostArrays, num_rows: int, num_seqs: int) -> None:
    """Everything from row `num_rows` and sequence `num_seqs` on: rows that write nothing, sequences without a key."""
    arrays["cu_seqlens"][0] = 0
    if num_rows < len(arrays["token_ids"]):
        for name in ("token_ids", "positions", "aux_rows"):
            arrays[name][num_rows:] = 0
        arrays["slots"][num_rows:] = -1
    if num_seqs < len(arrays["seq_lens"]):
        arrays["cu_seqlens"][num_seqs + 1 :] = num_rows
        for name in ("seq_lens", "last_rows"):
            arrays[name][num_seqs:] = 0


def fill_extension(arrays: HostArrays, plan: DraftPlan, rows: RowArrays, first_aux_row: int) -> None:
    """Write a checked plan.

    Args:
        first_aux_row: where the region begins that the plan's `aux_rows` count from.
    """
    num_rows, num_seqs = len(rows.sequence), len(rows.ends)
    arrays["token_ids"][:num_rows] = plan.rows.token_ids
    arrays["positions"][:num_rows] = rows.positions
    arrays["slots"][:num_rows] = rows.slots
    arrays["aux_rows"][:num_rows] = plan.aux_rows + first_aux_row
    arrays["cu_seqlens"][1 : num_seqs + 1] = rows.ends
    arrays["seq_lens"][:num_seqs] = plan.rows.seq_lens
    arrays["last_rows"][:num_seqs] = rows.ends - 1
    pad_extension(arrays, num_rows, num_seqs)


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
            **dict.fromkeys(("first_len", "first_index", "most", "room", "drawn_rows"), (seqs, np.int64)),
            **{name: (seqs, dtype) for name, (dtype, _) in SAMPLING_SPECS.items()},
        }
    )


def pad_proposals(arrays: HostArrays, num_seqs: int) -> None:
    """Sequences from `num_seqs` on: they write nothing and have no key."""
    if num_seqs < arrays["token_index"].shape[1]:
        for name in ("seq_lens", "positions", "token_index", "is_wanted", "counts"):
            arrays[name][:, num_seqs:] = 0
        arrays["slots"][:, num_seqs:] = -1
        pad_sampling(arrays, num_seqs)


def fill_proposals(arrays: HostArrays, plan: DraftPlan, block_size: int) -> None:
    """Write a checked plan, all its sequences. `is_wanted`: draws to propose; `counts`: draws whose failure counts, of
    which the first tells whether the extension was finite, of a sequence that proposes nothing too.

    A sequence that wants fewer proposals, or none, stays in the batch: its further rows write nothing, see only slots
    that it owns, and what they draw is dropped.
    """
    num_seqs = len(plan.num_proposals)
    _fill_steps(arrays, plan, block_size)
    first_index = np.zeros(num_seqs, np.int64)
    first_index[plan.num_proposals > 0] = plan.output_index
    step = np.arange(len(arrays["token_index"]))[:, None]
    arrays["token_index"][:, :num_seqs] = first_index + step
    arrays["is_wanted"][:, :num_seqs] = step < plan.num_proposals
    arrays["counts"][:, :num_seqs] = step < np.maximum(plan.num_proposals, 1)
    fill_steps_sampling(arrays, plan)
    pad_proposals(arrays, num_seqs)


def fill_steps_sampling(arrays: HostArrays, plan: DraftPlan) -> None:
    """Parameters of the draws, of padded sequences too."""
    num_seqs, proposing = len(plan.num_proposals), np.flatnonzero(plan.num_proposals)
    pad_sampling(arrays, num_seqs if len(proposing) == num_seqs else 0)
    fill_sampling(arrays, plan.sampling, proposing)
    arrays["temperature"][proposing[plan.greedy]] = 0


def _fill_steps(arrays: HostArrays, plan: DraftPlan, block_size: int) -> None:
    """Row `seq_len + step - 1` of each sequence, for step 1 to k - 1."""
    num_steps, num_seqs = len(arrays["slots"]), len(plan.num_proposals)
    if not num_steps:
        return
    step = np.arange(1, num_steps + 1)[:, None]
    seq_lens = plan.rows.seq_lens + np.minimum(step, np.maximum(plan.num_proposals - 1, 0))
    positions = seq_lens.astype(np.int64) - 1
    slots = slots_of(plan.rows.block_table, np.arange(num_seqs), positions, block_size)
    arrays["seq_lens"][:, :num_seqs] = seq_lens
    arrays["positions"][:, :num_seqs] = positions
    arrays["slots"][:, :num_seqs] = np.where(step < plan.num_proposals, slots, -1)
