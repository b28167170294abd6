"""The ops on the token table one row and one sequence after another, for tests."""

from collections.abc import Mapping
from itertools import pairwise

from torch import Tensor

from kimi_kernels.sampling_inputs import PLACEHOLDER_TOKEN_ID, STATUS_NOT_FINITE


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
    token_ids.fill_(0)
    window.fill_(PLACEHOLDER_TOKEN_ID)
    for seq, (start, end) in enumerate(pairwise(step["cu_seqlens"].tolist())):
        last, *ours = drawn[step["table_rows"][seq]].tolist()
        stamp, status, *theirs = proposed[step["table_rows"][seq]].tolist()
        is_asked_for = stamp == step["stamp"].item()
        draft_status[seq] = status if is_asked_for else STATUS_NOT_FINITE
        first = end - int(step["num_draft_tokens"][seq])
        for row in range(start, end):
            token = PLACEHOLDER_TOKEN_ID
            if row - start < step["num_given"][seq]:
                token = int(step["token_ids"][row])
            elif row == first - 1:
                token = ours[min(max(last, 0), len(ours) - 1)]
            elif row >= first and is_asked_for:
                token = theirs[row - first]
            token_ids[row] = min(max(token, 0), vocab_size - 1)
            if 0 <= row - first < window.shape[1]:
                window[seq, row - first] = token


def store_drawn(output_token_ids: Tensor, num_accepted_tokens: Tensor, table_rows: Tensor, drawn: Tensor) -> None:
    for tokens, count, row in zip(output_token_ids.tolist(), num_accepted_tokens.tolist(), table_rows, strict=True):
        for place, value in enumerate([count, *tokens]):
            drawn[row, place] = value


def _num_accepted(step: Mapping[str, Tensor], drawn: Tensor, seq: int) -> int:
    return min(max(int(drawn[step["table_rows"][seq], 0]), 0), max(int(step["num_drawn"][seq]) - 1, 0))


def read_drawn(step: Mapping[str, Tensor], drawn: Tensor, *, vocab_size: int) -> None:
    for seq, (start, end) in enumerate(pairwise(step["cu_seqlens"].tolist())):
        count = int(step["num_drawn"][seq])
        for place in range(count):
            token = int(drawn[step["table_rows"][seq], 1 + place])
            step["token_ids"][end - count + place] = min(max(token, 0), vocab_size - 1)
        step["last_rows"][seq] = end - max(count, 1) + _num_accepted(step, drawn, seq) if end > start else 0


def plan_steps(step: Mapping[str, Tensor], block_table: Tensor, drawn: Tensor, *, block_size: int) -> None:
    for seq, first_len in enumerate(step["first_len"].tolist()):
        is_live, num_accepted = first_len > 0, _num_accepted(step, drawn, seq)
        wanted = min(int(step["room"][seq]) - num_accepted, int(step["most"][seq])) if is_live else 0
        for draw in range(len(step["token_index"])):
            step["token_index"][draw, seq] = int(step["first_index"][seq]) + num_accepted + draw if is_live else 0
            step["is_wanted"][draw, seq] = draw < wanted
            step["counts"][draw, seq] = is_live and draw < max(wanted, 1)
            if draw:
                seq_len = first_len + num_accepted + min(draw, max(wanted - 1, 0)) if is_live else 0
                position = max(seq_len - 1, 0)
                slot = int(block_table[seq, position // block_size]) * block_size + position % block_size
                step["seq_lens"][draw - 1, seq], step["positions"][draw - 1, seq] = seq_len, position
                step["slots"][draw - 1, seq] = slot if draw < wanted else -1


def store_proposals(token_ids: Tensor, status: Tensor, step: Mapping[str, Tensor], proposed: Tensor) -> None:
    for seq, row in enumerate(step["table_rows"].tolist()):
        failed = max(int(status[draw, seq] * step["counts"][draw, seq]) for draw in range(len(status)))
        proposed[row, 0], proposed[row, 1] = step["stamp"].item(), failed
        for draw in range(len(status)):
            is_kept = step["is_wanted"][draw, seq] > 0 and not failed
            proposed[row, 2 + draw] = token_ids[draw, seq] if is_kept else PLACEHOLDER_TOKEN_ID
