"""Sampling and verification as docs/sampling.md says, step by step: no row goes a way of its own, no noise is kept."""

import torch
from torch import Tensor

from kimi_kernels.sampling.gumbel import gumbel_from_bits
from kimi_kernels.sampling.philox import noise_bits
from kimi_kernels.sampling.processors import ColumnOrder, process_logits
from kimi_kernels.sampling.weights import NEGATIVE_INFINITY, FilterParams, surviving_tokens
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
    logits: Tensor, inputs: SamplingInputs, rows: SamplingRows, vocabulary_map: VocabularyMap | None = None
) -> SampleOutput:
    order = ColumnOrder.from_map(vocabulary_map)
    raw = logits.float() if order.source_column is None else logits.float()[:, order.source_column]
    token_ids = torch.arange(raw.shape[1], device=raw.device) if order.token_ids is None else order.token_ids
    processed = raw.clone()
    process_logits(processed, inputs, rows, order)

    temperature = inputs.temperature[rows.sequence][:, None]
    is_greedy = temperature < GREEDY_TEMPERATURE
    scaled = torch.where(is_greedy, processed, processed * (torch.ones_like(temperature) / temperature))
    vocab_size = raw.shape[1] if vocabulary_map is None else len(vocabulary_map.column_of_token_id)
    noise = gumbel_from_bits(noise_bits(inputs.seed[rows.sequence], rows.token_index, vocab_size))[:, token_ids]
    score = torch.where(is_greedy, scaled.double(), scaled.double() + noise.double())
    filters = FilterParams.of_rows(inputs, rows.sequence)
    if filters is not None:
        score = score.where(is_greedy | surviving_tokens(scaled, filters), NEGATIVE_INFINITY)

    best, is_raw_fine = scaled.amax(dim=1), raw.amax(dim=1) < float("inf")  # amax hands a NaN on
    status = torch.where(is_raw_fine & (best == NEGATIVE_INFINITY), STATUS_NO_TOKEN_LEFT, STATUS_NOT_FINITE)
    status = torch.where(is_raw_fine & best.isfinite(), STATUS_OK, status).int()
    drawn = token_ids[score.argmax(dim=1)].where(status == STATUS_OK, PLACEHOLDER_TOKEN_ID)
    return SampleOutput(token_ids=drawn, status=status)


def mask_logits(logits: Tensor, logit_mask: Tensor, mask_of_row: Tensor) -> None:
    token = torch.arange(logits.shape[1], device=logits.device)
    for row, place in zip(logits, mask_of_row.tolist(), strict=True):
        if place >= 0:
            is_ruled_out = (logit_mask[place][token // 32] >> (token % 32)) & 1 == 0
            row[is_ruled_out & ~row.isnan() & (row != float("inf"))] = NEGATIVE_INFINITY


def verify_draft_tokens(
    token_ids: Tensor, status: Tensor, first_row: Tensor, draft_token_ids: Tensor, num_draft_tokens: Tensor
) -> VerifyOutput:
    width = draft_token_ids.shape[1]
    outputs, accepted = [], []
    for first, drafted, length in zip(first_row, draft_token_ids, num_draft_tokens, strict=True):
        count = 0
        while count < length and status[first + count] == STATUS_OK and token_ids[first + count] == drafted[count]:
            count += 1
        accepted.append(count)
        outputs.append([*token_ids[first : first + count + 1].tolist(), *[PLACEHOLDER_TOKEN_ID] * (width - count)])
    last_row = first_row + torch.tensor(accepted, dtype=torch.int64, device=first_row.device)
    return VerifyOutput(
        output_token_ids=token_ids.new_tensor(outputs).view(-1, width + 1),
        num_accepted_tokens=(last_row - first_row).int(),
        last_row=last_row,
        status=status[last_row],
    )
