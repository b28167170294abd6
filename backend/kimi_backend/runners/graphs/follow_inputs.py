"""A draft step that follows a verify at once: what depends on the accepted tokens is worked out on the device.

The host writes what it knows and uploads it, and `kimi_kernels.draft_steps` corrects it from what the verify drew. Then
the captured steps run as ever.
"""

import numpy as np

from kimi_backend.runners.graphs.draft_inputs import fill_extension, fill_steps_sampling
from kimi_backend.runners.graphs.static_arrays import HostArrays
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import DraftPlan, FollowPlan


def fill_following_extension(
    arrays: HostArrays, plan: DraftPlan, follow: FollowPlan, rows: RowArrays, first_aux_row: int, drawn_width: int
) -> None:
    """Write a checked plan. drawn_width: tokens in a row of the drawn ones."""
    fill_extension(arrays, plan, rows, first_aux_row)
    num_rows, num_seqs = len(rows.sequence), len(rows.ends)
    first_row = rows.ends - plan.rows.query_lens
    arrays["last_rows"][:num_seqs] = first_row
    arrays["drawn_rows"][:num_seqs] = follow.drawn_rows
    arrays["drawn_rows"][num_seqs:] = 0
    place = np.arange(num_rows) - first_row[rows.sequence]
    arrays["drawn_places"][:num_rows] = follow.drawn_rows[rows.sequence].astype(np.int64) * drawn_width + place
    arrays["drawn_places"][num_rows:] = 0


def fill_following_proposals(arrays: HostArrays, plan: DraftPlan, follow: FollowPlan) -> None:
    """Write a checked plan, all its sequences. Lengths, positions, slots and indices are left to the device."""
    num_seqs = len(plan.num_proposals)
    arrays["first_len"][:num_seqs] = plan.rows.seq_lens - plan.rows.query_lens + 1
    arrays["first_index"][:num_seqs] = follow.first_index
    arrays["most"][:num_seqs] = plan.num_proposals
    arrays["room"][:num_seqs] = follow.room
    arrays["drawn_rows"][:num_seqs] = follow.drawn_rows
    for name in ("first_len", "first_index", "most", "room", "drawn_rows"):
        arrays[name][num_seqs:] = 0
    fill_steps_sampling(arrays, plan)
