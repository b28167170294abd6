"""Logit processors before the temperature: penalties, bias, bans (docs/sampling.md, "Processors").

`logits` is [R, C] float32 and owned by the caller's call: these functions change it in place. Columns are those of a
`ColumnOrder`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_kernels.sampling.weights import NEGATIVE_INFINITY
from kimi_kernels.sampling_inputs import SamplingInputs, SamplingRows, VocabularyMap


@dataclass(frozen=True, slots=True)
class ColumnOrder:
    """Columns by ascending token id. `None` everywhere: column c holds token c."""

    token_ids: Tensor | None = None
    """[C] int64, ascending."""
    source_column: Tensor | None = None
    """[C] int64: the column of the caller's logits."""
    column_of_token_id: Tensor | None = None
    """[vocab_size] int64, -1 for none."""

    @staticmethod
    def from_map(vocabulary_map: VocabularyMap | None) -> "ColumnOrder":
        if vocabulary_map is None:
            return ColumnOrder()
        token_ids, source_column = vocabulary_map.token_id_of_column.sort()
        column_of_token_id = torch.full_like(vocabulary_map.column_of_token_id, -1)
        column_of_token_id[token_ids] = torch.arange(token_ids.numel(), device=token_ids.device)
        return ColumnOrder(token_ids, source_column, column_of_token_id)

    def columns(self, token_ids: Tensor) -> Tensor:
        """Columns of token ids, int64; -1 where there is none."""
        token_ids = token_ids.long()
        if self.column_of_token_id is None:
            return token_ids
        return torch.where(token_ids < 0, -1, self.column_of_token_id[token_ids.clamp(min=0)])


def process_logits(logits: Tensor, inputs: SamplingInputs, rows: SamplingRows, order: ColumnOrder) -> None:
    """Penalties, bias, bans, in place. What no sequence uses costs nothing."""
    _apply_penalties(logits, inputs, rows, order)
    if inputs.bias_ids.numel():
        row, entry = _entries_of_rows(inputs.bias_offsets, rows.sequence)
        row, column, entry = _on_columns(row, order.columns(inputs.bias_ids[entry]), entry)
        logits[row, column] += inputs.bias_values[entry]
    if inputs.ban_ids.numel():
        row, entry = _entries_of_rows(inputs.ban_offsets, rows.sequence)
        is_banned = rows.token_index[row] < inputs.ban_until[entry]
        row, column, _ = _on_columns(row[is_banned], order.columns(inputs.ban_ids[entry[is_banned]]), row[is_banned])
        logits[row, column] = NEGATIVE_INFINITY
    if inputs.bad_word_tokens.numel():
        _ban_bad_words(logits, inputs, rows, order)
    if rows.logit_mask is not None:
        assert rows.mask_of_row is not None
        logits.masked_fill_(banned(logits, rows.logit_mask, rows.mask_of_row, order), NEGATIVE_INFINITY)


def _entries_of_rows(offsets: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """(row, entry) int64 of every CSR entry of every row's sequence."""
    start, stop = offsets[sequence].long(), offsets[sequence + 1].long()
    length = stop - start
    row = torch.repeat_interleave(torch.arange(sequence.numel(), device=sequence.device), length)
    first = length.cumsum(0) - length
    return row, torch.arange(row.numel(), device=row.device) - first[row] + start[row]


def _on_columns(row: Tensor, column: Tensor, entry: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Only entries that have a column."""
    has_column = column >= 0
    return row[has_column], column[has_column], entry[has_column]


def _apply_penalties(logits: Tensor, inputs: SamplingInputs, rows: SamplingRows, order: ColumnOrder) -> None:
    """Only on rows of sequences that own penalty entries: a sequence with penalties has its prompt there."""
    if not inputs.penalty_ids.numel():
        return
    num_entries = inputs.penalty_offsets[1:] - inputs.penalty_offsets[:-1]
    used = num_entries[rows.sequence].nonzero().flatten()
    repetition, frequency, presence = (
        values[rows.sequence[used]][:, None]
        for values in (inputs.repetition_penalty, inputs.frequency_penalty, inputs.presence_penalty)
    )
    counts, in_prompt = _token_counts(logits.shape[1], inputs, rows, used, order)
    value = logits[used]
    inverse = torch.ones_like(repetition) / repetition
    repeated = torch.where(value > 0.0, value * inverse, value * repetition)
    value = torch.where(in_prompt | (counts > 0), repeated, value)
    value = value - frequency * counts.to(torch.float32)
    logits[used] = torch.where(counts > 0, value - presence, value)


def _token_counts(
    num_columns: int, inputs: SamplingInputs, rows: SamplingRows, used: Tensor, order: ColumnOrder
) -> tuple[Tensor, Tensor]:
    """Count each token in the output before each row's draw; tell which stand in the prompt."""
    sequence = rows.sequence[used]
    counts = torch.zeros(used.numel(), num_columns, dtype=torch.int32, device=used.device)
    in_prompt = torch.zeros(used.numel(), num_columns, dtype=torch.bool, device=used.device)
    row, entry = _entries_of_rows(inputs.penalty_offsets, sequence)
    row, column, entry = _on_columns(row, order.columns(inputs.penalty_ids[entry]), entry)
    counts[row, column] = inputs.penalty_counts[entry]
    in_prompt[row, column] = inputs.penalty_in_prompt[entry]
    if rows.window_token_ids.shape[1]:
        columns = order.columns(rows.window_token_ids)[sequence]
        place = torch.arange(columns.shape[1], device=columns.device)
        stands = (place < rows.window_len[used][:, None]) & (columns >= 0)
        counts.scatter_add_(1, columns.clamp(min=0), stands.to(torch.int32))
    return counts, in_prompt


def _ban_bad_words(logits: Tensor, inputs: SamplingInputs, rows: SamplingRows, order: ColumnOrder) -> None:
    """Ban the last token of each word whose other tokens are the last ones before the row's draw."""
    row, word = _entries_of_rows(inputs.bad_word_offsets, rows.sequence)
    start, stop = inputs.bad_word_token_offsets[word].long(), inputs.bad_word_token_offsets[word + 1].long()
    max_tail = inputs.history_tail.shape[1]
    before = torch.cat((inputs.history_tail, rows.window_token_ids), dim=1)[rows.sequence]
    end = max_tail + rows.window_len.long()
    matches = torch.ones_like(row, dtype=torch.bool)
    for back in range(1, int((stop - start).max()) if word.numel() else 1):
        # The token `back` places before the draw against the word's token as far before its last one.
        at, of_word = end[row] - back, stop - 1 - back
        is_inside = of_word >= start
        token = torch.where(at >= 0, before[row, at.clamp(min=0)] if before.shape[1] else -1, -1)
        matches &= ~is_inside | (token == inputs.bad_word_tokens[of_word.clamp(min=0)])
    row, column, _ = _on_columns(row[matches], order.columns(inputs.bad_word_tokens[stop[matches] - 1]), row[matches])
    logits[row, column] = NEGATIVE_INFINITY


def banned(logits: Tensor, logit_mask: Tensor, mask_of_row: Tensor, order: ColumnOrder) -> Tensor:
    """[R, C] bool: columns that a row's mask rules out."""
    if not len(logit_mask):
        return torch.zeros_like(logits, dtype=torch.bool)
    token_ids = order.token_ids
    if token_ids is None:
        token_ids = torch.arange(logits.shape[1], device=logits.device)
    words = logit_mask[mask_of_row.clamp(min=0).long()]
    is_banned = (words[:, token_ids // 32] >> (token_ids % 32).to(torch.int32)) & 1 == 0
    return is_banned & (mask_of_row >= 0)[:, None]
