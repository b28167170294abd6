"""Sampling and verification in plain torch: the definition in docs/sampling.md, step by step.

R rows of logits, C columns, B sequences, W window tokens.
"""

import torch
from torch import Tensor

from kimi_kernels.sampling.gumbel_reference import gumbel_from_bits
from kimi_kernels.sampling.logprobs_reference import row_logprobs
from kimi_kernels.sampling.philox_reference import noise_bits
from kimi_kernels.sampling.processors_reference import ColumnOrder, process_logits
from kimi_kernels.sampling.weights_reference import NEGATIVE_INFINITY, FilterParams, surviving_tokens
from kimi_kernels.sampling_inputs import (
    GREEDY_TEMPERATURE,
    PLACEHOLDER_TOKEN_ID,
    STATUS_NO_TOKEN_LEFT,
    STATUS_NOT_FINITE,
    STATUS_OK,
    SampleOutput,
    SamplingInputs,
    SamplingRows,
    VerifyOutput,
    VocabularyMap,
)


def sample_tokens(
    logits: Tensor,
    inputs: SamplingInputs,
    rows: SamplingRows,
    vocabulary_map: VocabularyMap | None = None,
    num_logprobs: int | None = None,
) -> SampleOutput:
    """See `signatures.SampleTokens`."""
    order = ColumnOrder.from_map(vocabulary_map)
    raw = logits.to(torch.float32, copy=True)
    if order.source_column is not None:
        raw = raw[:, order.source_column]
    processed = raw if num_logprobs is None else raw.clone()
    is_finite = raw.amax(dim=1) < float("inf")  # amax hands a NaN on
    process_logits(processed, inputs, rows, order)
    column, best = _draw(processed, inputs, rows, order)
    has_none_left = is_finite & (best == NEGATIVE_INFINITY)
    is_ok = is_finite & best.isfinite()
    token_ids = column if order.token_ids is None else order.token_ids[column]
    token_ids = torch.where(is_ok, token_ids, PLACEHOLDER_TOKEN_ID)
    failure = torch.where(has_none_left, STATUS_NO_TOKEN_LEFT, STATUS_NOT_FINITE)
    status = torch.where(is_ok, STATUS_OK, failure).to(torch.int32)
    if num_logprobs is None:
        return SampleOutput(token_ids=token_ids, status=status)
    drawn, top, top_columns = row_logprobs(raw, column, num_logprobs)
    return SampleOutput(
        token_ids=token_ids,
        status=status,
        logprobs=drawn,
        top_logprob_ids=top_columns if order.token_ids is None else order.token_ids[top_columns],
        top_logprobs=top,
    )


def _draw(processed: Tensor, inputs: SamplingInputs, rows: SamplingRows, order: ColumnOrder) -> tuple[Tensor, Tensor]:
    """(column drawn, largest logit after temperature) of each row; argmax takes the first of equals, so the lowest
    token id."""
    temperature = inputs.temperature[rows.sequence]
    is_greedy = temperature < GREEDY_TEMPERATURE
    num_greedy = int(is_greedy.sum())
    if num_greedy == 0:
        return _draw_with_noise(processed, temperature, rows.sequence, rows.token_index, inputs, order)
    best, column = processed.amax(dim=1), processed.argmax(dim=1)
    if num_greedy < column.numel():
        noisy = (~is_greedy).nonzero().flatten()
        column[noisy], best[noisy] = _draw_with_noise(
            processed[noisy], temperature[noisy], rows.sequence[noisy], rows.token_index[noisy], inputs, order
        )
    return column, best


def _draw_with_noise(
    processed: Tensor,
    temperature: Tensor,
    sequence: Tensor,
    token_index: Tensor,
    inputs: SamplingInputs,
    order: ColumnOrder,
) -> tuple[Tensor, Tensor]:
    """Draw as `_draw` does, for rows at a temperature."""
    scaled = processed * (torch.ones_like(temperature) / temperature)[:, None]
    vocab_size = scaled.shape[1] if order.column_of_token_id is None else order.column_of_token_id.numel()
    bits = noise_bits(inputs.seed[sequence], token_index, vocab_size)
    if order.token_ids is not None:
        bits = bits[:, order.token_ids]
    # Both terms are float32, their sum is rounded once, to float64: the noise keeps its bits beside a large logit.
    score = scaled.to(torch.float64) + gumbel_from_bits(bits).to(torch.float64)
    filters = FilterParams.of_rows(inputs, sequence)
    if filters is not None:
        score.masked_fill_(~surviving_tokens(scaled, filters), NEGATIVE_INFINITY)
    return score.argmax(dim=1), scaled.amax(dim=1)


def verify_draft_tokens(
    token_ids: Tensor,
    status: Tensor,
    first_row: Tensor,
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
) -> VerifyOutput:
    """See `signatures.VerifyDraftTokens`."""
    width = draft_token_ids.shape[1]
    place = torch.arange(width + 1, device=token_ids.device)
    is_row = place <= num_draft_tokens[:, None]
    row = first_row[:, None] + place * is_row  # a place that holds no row reads the sequence's first
    drawn, row_status = token_ids[row], status[row]
    is_match = (drawn[:, :width] == draft_token_ids) & is_row[:, 1:] & (row_status[:, :width] == STATUS_OK)
    num_accepted = is_match.to(torch.int32).cumprod(dim=1).sum(dim=1)
    is_used = place <= num_accepted[:, None]
    last_row = first_row + num_accepted
    return VerifyOutput(
        output_token_ids=torch.where(is_used, drawn, PLACEHOLDER_TOKEN_ID),
        num_accepted_tokens=num_accepted.to(torch.int32),
        last_row=last_row,
        status=status[last_row],
    )
