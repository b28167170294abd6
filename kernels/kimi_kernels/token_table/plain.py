"""The ops on the token table in torch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kimi_kernels.sampling_inputs import PLACEHOLDER_TOKEN_ID, STATUS_NOT_FINITE
from kimi_kernels.token_table.op import check_output_token_ids, check_window


def read_tokens(
    step: Mapping[str, Tensor],
    drawn: Tensor,
    proposed: Tensor,
    token_ids: Tensor,
    window: Tensor,
    draft_status: Tensor,
    *,
    vocab_size: int,
) -> None:
    check_window(window)
    cu_seqlens, sequence, counts = step["cu_seqlens"].long(), step["sequence"], step["num_draft_tokens"].long()
    starts, ends, rows = cu_seqlens[:-1], cu_seqlens[1:], step["table_rows"]
    theirs, ours = proposed[rows], drawn[rows]
    is_asked_for = theirs[:, 0] == step["stamp"]
    last = ours[:, 1:].gather(1, ours[:, :1].long().clamp(0, ours.shape[1] - 2))
    held = torch.cat([last, theirs[:, 2:].masked_fill(~is_asked_for[:, None], PLACEHOLDER_TOKEN_ID)], 1)
    row = torch.arange(len(sequence), device=sequence.device)
    place = row - (ends - 1 - counts)[sequence]  # 0 is the last token's row
    found = held[sequence, place.clamp(0, held.shape[1] - 1)]
    is_given = row - starts[sequence] < step["num_given"][sequence]
    tokens = torch.where(is_given, step["token_ids"], found).masked_fill(row >= ends[sequence], PLACEHOLDER_TOKEN_ID)
    token_ids.copy_(tokens.clamp(0, vocab_size - 1))
    draft = torch.arange(window.shape[1], device=sequence.device)
    checked = tokens[((ends - counts)[:, None] + draft).clamp(0, len(tokens) - 1)]
    window.copy_(checked.masked_fill(draft >= counts[:, None], PLACEHOLDER_TOKEN_ID))
    draft_status.copy_(theirs[:, 1].masked_fill(~is_asked_for, STATUS_NOT_FINITE))


def store_drawn(output_token_ids: Tensor, num_accepted_tokens: Tensor, table_rows: Tensor, drawn: Tensor) -> None:
    check_output_token_ids(output_token_ids)
    drawn[table_rows, 0] = num_accepted_tokens
    drawn[table_rows, 1 : 1 + output_token_ids.shape[1]] = output_token_ids.to(drawn.dtype)


def _accepted(step: Mapping[str, Tensor], drawn: Tensor) -> Tensor:
    """[B] int64 accepted draft tokens, never more than were verified."""
    most = (step["num_drawn"].long() - 1).clamp(min=0)
    return torch.minimum(drawn[step["table_rows"], 0].long().clamp(min=0), most)


def read_drawn(step: Mapping[str, Tensor], drawn: Tensor, *, vocab_size: int) -> None:
    cu_seqlens, sequence, counts = step["cu_seqlens"].long(), step["sequence"], step["num_drawn"].long()
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    row = torch.arange(len(sequence), device=sequence.device)
    place = row - (ends - counts)[sequence]
    found = drawn[step["table_rows"][sequence], 1 + place.clamp(0, drawn.shape[1] - 2)].clamp(0, vocab_size - 1)
    is_drawn = (place >= 0) & (row < ends[sequence])
    step["token_ids"].copy_(torch.where(is_drawn, found, step["token_ids"]))
    last = ends - 1 - (counts - 1).clamp(min=0) + _accepted(step, drawn)
    step["last_rows"].copy_(last.masked_fill(ends <= starts, 0))


def plan_steps(step: Mapping[str, Tensor], block_table: Tensor, drawn: Tensor, *, block_size: int) -> None:
    accepted, is_live = _accepted(step, drawn), step["first_len"] > 0
    length = step["first_len"] + accepted
    wanted = torch.minimum(step["room"] - accepted, step["most"]).clamp(min=0) * is_live
    draw = torch.arange(len(step["token_index"]), device=wanted.device)[:, None]
    step["token_index"].copy_((step["first_index"] + accepted + draw) * is_live)
    step["is_wanted"].copy_(draw < wanted)
    step["counts"].copy_((draw < wanted.clamp(min=1)) & is_live)
    between = draw[1:]
    seq_lens = (length + torch.minimum(between, (wanted - 1).clamp(min=0))) * is_live
    positions = (seq_lens - 1).clamp(min=0)
    blocks = block_table.gather(1, (positions // block_size).T).T
    slots = blocks * block_size + positions % block_size
    step["seq_lens"].copy_(seq_lens)
    step["positions"].copy_(positions)
    step["slots"].copy_(slots.masked_fill(between >= wanted, -1))


def store_proposals(token_ids: Tensor, status: Tensor, step: Mapping[str, Tensor], proposed: Tensor) -> None:
    rows, failed = step["table_rows"], (status * step["counts"]).amax(0)
    is_kept = (step["is_wanted"] > 0) & (failed == 0)
    proposed[rows, 0] = step["stamp"].expand(len(rows))
    proposed[rows, 1] = failed
    proposed[rows, 2 : 2 + len(token_ids)] = token_ids.masked_fill(~is_kept, PLACEHOLDER_TOKEN_ID).to(proposed.dtype).T
