"""Running sequences as columns of arrays, so that a step's plan is cut by index and not built token by token."""

import numpy as np

from kimi_backend.scheduler.sampling_table import SamplingTable
from kimi_backend.scheduler.sequence import Sequence
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS, TokenOrigin


class BatchTable:
    """One row for each running sequence, kept for as long as it runs."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        """max_blocks: of one sequence of the largest length."""
        self.sampling = SamplingTable(num_rows)
        self.pending_token_ids = np.zeros((num_rows, MAX_SPECULATIVE_TOKENS + 1), np.int32)
        """[num_rows, 8] the last token, then the draft tokens in flight, those that the host has."""
        self.is_in_table = np.zeros(num_rows, np.bool_)
        """[num_rows] whether the draft tokens in flight stand in the runners' token table and not here."""
        self.target_blocks = np.zeros((num_rows, max_blocks), np.int32)
        self.draft_blocks = np.zeros((num_rows, max_blocks), np.int32)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Give a row to a sequence that has just been given blocks."""
        row = sequence.row = self._free_rows.pop()
        self.is_in_table[row] = False
        self.sampling.set_row(row, sequence)
        self.pending_token_ids[row, 0] = sequence.token_ids[-1]
        self.write_blocks(sequence, 0, 0)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence's row back."""
        self._free_rows.append(sequence.row)
        sequence.row = -1

    def write_blocks(self, sequence: Sequence, first_target: int, first_draft: int) -> None:
        """Copy the block ids from the given places on."""
        blocks = sequence.blocks
        assert blocks is not None
        target_ids, draft_ids = blocks.target_ids, blocks.draft_ids
        if len(target_ids) > first_target:
            self.target_blocks[sequence.row, first_target : len(target_ids)] = target_ids[first_target:]
        if len(draft_ids) > first_draft:
            self.draft_blocks[sequence.row, first_draft : len(draft_ids)] = draft_ids[first_draft:]

    def give_draft_tokens(self, sequence: Sequence, token_ids: list[int], origin: TokenOrigin) -> None:
        """Let the next verify check these, which the host has, and none that stand in the runners' token table."""
        self.pending_token_ids[sequence.row, 1 : 1 + len(token_ids)] = token_ids
        self.is_in_table[sequence.row] = False
        sequence.num_draft_tokens, sequence.draft_origin = len(token_ids), origin

    def set_last_tokens(self, sequences: list[Sequence]) -> None:
        """Let the last token of each be its next step's first row, with no draft tokens behind it yet."""
        if sequences:
            rows = [sequence.row for sequence in sequences]
            self.pending_token_ids[rows, 0] = [sequence.last_token_id for sequence in sequences]
