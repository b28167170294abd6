"""Plain torch definitions of the ops between a verify and the draft step that follows it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kimi_kernels.sampling_inputs import PLACEHOLDER_TOKEN_ID


def follow_verify(
    extension: Mapping[str, Tensor],
    proposals: Mapping[str, Tensor],
    block_table: Tensor,
    output_token_ids: Tensor,
    num_accepted_tokens: Tensor,
    *,
    block_size: int,
    vocab_size: int,
) -> None:
    """Correct a draft step's inputs, in place, by what the verify before it drew and accepted.

    Args:
        extension: of T rows and B sequences. Given: drawn_places [T] int64, places of the rows' tokens in
            output_token_ids; drawn_rows [B] int64, its row of each sequence; last_rows [B] int64, first row of each
            sequence. Corrected: last_rows (then the last valid one); token_ids [T] int32.
        proposals: of B' sequences and k draws. Given, [B'] int64: drawn_rows; first_len and first_index, length after
            the extension and index of the first token drawn, of a sequence of which nothing is accepted, first_len 0
            for padding; most draws wanted, and room, from which accepted tokens take away. Corrected: token_index
            [k, B'] int64; is_wanted and counts [k, B'] int32, draws that are wanted and those whose failure counts;
            seq_lens [k - 1, B'] int32, positions and slots [k - 1, B'] int64 of the steps between the draws.
        block_table: [B', max_blocks] int32.
        output_token_ids: [rows, tokens] int64, contiguous. num_accepted_tokens: [rows] int32.
        block_size: of the cache that the slots lie in.
        vocab_size: token ids beyond it become valid ones.
    """
    drawn = output_token_ids.reshape(-1)[extension["drawn_places"]]
    extension["token_ids"].copy_(drawn.clamp(0, vocab_size - 1))
    extension["last_rows"].add_(num_accepted_tokens[extension["drawn_rows"]])

    accepted = num_accepted_tokens[proposals["drawn_rows"]].long()
    is_live = proposals["first_len"] > 0
    length = proposals["first_len"] + accepted
    wanted = torch.minimum(proposals["room"] - accepted, proposals["most"]).clamp(min=0) * is_live
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


def leave_tokens(token_ids: Tensor, status: Tensor, is_wanted: Tensor, counts: Tensor, left: Tensor) -> None:
    """Put draws where the target takes them: the wanted ones, but none of a sequence of which one that counts failed.

    Args:
        token_ids: [k, B] int64. status, is_wanted, counts: [k, B] int32.
        left: [at least 1 + k, at least B] int32: status of each sequence, then its tokens, PLACEHOLDER_TOKEN_ID where
            there is none; the rest is left as it is.
    """
    num_draws, num_seqs = token_ids.shape
    failed = (status * counts).amax(0)
    is_kept = (is_wanted > 0) & (failed == 0)
    left[0, :num_seqs] = failed
    left[1 : 1 + num_draws, :num_seqs] = token_ids.masked_fill(~is_kept, PLACEHOLDER_TOKEN_ID).to(left.dtype)
