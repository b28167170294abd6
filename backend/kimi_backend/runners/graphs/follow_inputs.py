"""A draft step that follows a verify at once: what depends on the accepted tokens is worked out on the device.

The host writes the step as if all draft tokens were accepted, uploads it, and `follow_verify` corrects it from what the
verify drew. Then the captured steps run as ever.
"""

import numpy as np
import torch

from kimi_backend.runners.graphs.draft_inputs import fill_extension, fill_steps_sampling
from kimi_backend.runners.graphs.static_arrays import HostArrays
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import DraftPlan, FollowPlan

Tensors = dict[str, torch.Tensor]


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
    """Write a checked plan, all its sequences. Lengths, positions, slots and indices are left to `follow_verify`."""
    num_seqs = len(plan.num_proposals)
    arrays["first_len"][:num_seqs] = plan.rows.seq_lens - plan.rows.query_lens + 1
    arrays["first_index"][:num_seqs] = follow.first_index
    arrays["most"][:num_seqs] = plan.num_proposals
    arrays["room"][:num_seqs] = follow.room
    arrays["drawn_rows"][:num_seqs] = follow.drawn_rows
    for name in ("first_len", "first_index", "most", "room", "drawn_rows"):
        arrays[name][num_seqs:] = 0
    fill_steps_sampling(arrays, plan)


def follow_verify(
    extension: Tensors,
    proposals: Tensors,
    block_table: torch.Tensor,
    output_token_ids: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    *,
    block_size: int,
    vocab_size: int,
) -> None:
    """Correct uploaded arrays, of B sequences and k proposals, by what was accepted.

    Args:
        extension, proposals: of two buckets, whose numbers of sequences may differ.
        block_table: [B, max_blocks] int32.
        output_token_ids, num_accepted_tokens: as in `DrawnHandle`.
    """
    drawn = output_token_ids.reshape(-1)[extension["drawn_places"]]
    extension["token_ids"].copy_(drawn.clamp(0, vocab_size - 1))
    extension["last_rows"].add_(num_accepted_tokens[extension["drawn_rows"]])

    accepted = num_accepted_tokens[proposals["drawn_rows"]].long()
    is_live = proposals["first_len"] > 0
    length = proposals["first_len"] + accepted
    wanted = torch.minimum(proposals["room"] - accepted, proposals["most"]).clamp(min=0)
    draw = torch.arange(len(proposals["token_index"]), device=wanted.device)[:, None]
    proposals["token_index"].copy_((proposals["first_index"] + accepted + draw) * is_live)
    proposals["is_wanted"].copy_(draw < wanted)
    proposals["counts"].copy_((draw < wanted.clamp(min=1)) & is_live)
    step = draw[1:]
    seq_lens = (length + torch.minimum(step, (wanted - 1).clamp(min=0))) * is_live
    positions = (seq_lens - 1).clamp(min=0)
    blocks = block_table.gather(1, (positions // block_size).T).T
    slots = blocks * block_size + positions % block_size
    proposals["seq_lens"].copy_(seq_lens)
    proposals["positions"].copy_(positions)
    proposals["slots"].copy_(slots.masked_fill(step >= wanted, -1))
