"""The contract of the ops on the token table: T rows and B sequences of a step, padding among them."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from kimi_kernels.argument_checks import require


class TokenTableOps(Protocol):
    """A module of one implementation."""

    def read_tokens(
        self,
        step: Mapping[str, Tensor],
        drawn: Tensor,
        proposed: Tensor,
        token_ids: Tensor,
        window: Tensor,
        draft_status: Tensor,
        *,
        vocab_size: int,
    ) -> None:
        """Put a verify's tokens together from what its plan gives and what the table holds, in one read of the table.

        Args:
            step: token_ids [T] int32; sequence [T] int64, of each row; cu_seqlens [B + 1] int32; num_given [B] int32,
                leading rows whose token stands in token_ids; table_rows [B] int64; num_draft_tokens [B] int32, rows at
                the end that hold draft tokens; stamp [1] int32, of the draft step whose proposals count.
            drawn, proposed: the table's halves.
            token_ids: [T] int32, written: what to embed; 0 in rows behind the last sequence's end.
            window: [B, W] int32, may be strided, written: draft tokens under verification, PLACEHOLDER_TOKEN_ID where
                there is none.
            draft_status: [B] int32, written: what the draft step says of each sequence; STATUS_NOT_FINITE where it says
                nothing.
            vocab_size: what is no token is embedded as some token.
        """
        ...

    def store_drawn(
        self, output_token_ids: Tensor, num_accepted_tokens: Tensor, table_rows: Tensor, drawn: Tensor
    ) -> None:
        """Keep what a verify drew.

        Args:
            output_token_ids: [B, at most W] int64. num_accepted_tokens: [B] int32. table_rows: [B] int64.
            drawn: the target's half.
        """
        ...

    def read_drawn(self, step: Mapping[str, Tensor], drawn: Tensor, *, vocab_size: int) -> None:
        """Put what the verify drew into a draft's extension, in place.

        Args:
            step: token_ids [T] int32, corrected in the rows that embed drawn tokens; sequence [T] int64; cu_seqlens [B
                + 1] int32; num_drawn [B] int32, rows at the end that embed them; table_rows [B] int64; last_rows [B]
                int64, which becomes each sequence's last row that counts.
            drawn: the target's half.
            vocab_size: what is no token is embedded as some token.
        """
        ...

    def plan_steps(self, step: Mapping[str, Tensor], block_table: Tensor, drawn: Tensor, *, block_size: int) -> None:
        """Work out a draft's draws and the single-row steps between them, in place.

        Args:
            step: of B sequences and k draws. Given, [B] int64: first_len and first_index, length after the extension
                and index of the first token drawn, of a sequence of which nothing is accepted, first_len 0 for padding;
                most draws wanted, and room, from which accepted tokens take away; table_rows; [B] int32 num_drawn.
                Worked out: token_index [k, B] int64; is_wanted and counts [k, B] int32, draws that are wanted and those
                whose failure counts; seq_lens [k - 1, B] int32, positions and slots [k - 1, B] int64 of the steps
                between the draws.
            block_table: [B, max_blocks] int32.
            drawn: the target's half.
            block_size: of the cache that the slots lie in.
        """
        ...

    def store_proposals(self, token_ids: Tensor, status: Tensor, step: Mapping[str, Tensor], proposed: Tensor) -> None:
        """Keep a draft step's draws: the wanted ones, but none of a sequence of which one that counts failed.

        Args:
            token_ids: [k, B] int64. status: [k, B] int32.
            step: is_wanted and counts, as `plan_steps` has them; table_rows [B] int64; stamp [1] int32 of this step.
            proposed: the draft's half. Columns behind the k tokens are left as they are.
        """
        ...


def check_window(window: Tensor) -> None:
    """Raise unless the rows of `read_tokens`' window are contiguous."""
    require(window.shape[1] == 0 or window.stride(1) == 1, "window", f"last stride {window.stride(1)}", "1")


def check_output_token_ids(output_token_ids: Tensor) -> None:
    """Raise unless `store_drawn`'s tokens lie side by side."""
    require(output_token_ids.is_contiguous(), "output_token_ids", output_token_ids.stride(), "contiguous rows")
