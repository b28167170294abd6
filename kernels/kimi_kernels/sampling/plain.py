"""Sampling in torch, with a row's noise computed once.

Verifying draws a token's noise again at every round until it is accepted, and drafting draws it before that. So noise
is made for NOISE_ROWS consecutive tokens of a sequence at a time, and of small vocabularies for several sequences at
once, which also shares the price of some hundred small operations. The latest blocks are kept.
"""

import threading
from collections import OrderedDict
from functools import lru_cache

import torch
from torch import Tensor

from kimi_kernels.sampling.gumbel import gumbel_from_bits
from kimi_kernels.sampling.logprobs import with_logprobs
from kimi_kernels.sampling.op import check_mask, check_sample, check_verify
from kimi_kernels.sampling.philox import noise_bits
from kimi_kernels.sampling.processors import ColumnOrder, banned, process_logits
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

NOISE_ROWS = 8
"""Tokens of a block of noise."""
MADE_VALUES = 2**15
"""Values of noise that are made at once, if a block has not more: what is beside them fits a core's cache."""
KEPT_VALUES = 2**22
"""Values of noise that are kept, 32 MB, and at least those of the last call."""

_column_order = lru_cache(maxsize=4)(ColumnOrder.from_map)


def sample_tokens(
    logits: Tensor,
    inputs: SamplingInputs,
    rows: SamplingRows,
    vocabulary_map: VocabularyMap | None = None,
    num_logprobs: int | None = None,
) -> SampleOutput:
    """`SampleTokens`."""
    check_sample(logits, rows, vocabulary_map)
    order = _column_order(vocabulary_map)
    raw = logits.float() if order.source_column is None else logits.float()[:, order.source_column]
    processed = raw
    if _has_processors(inputs, rows):
        processed = raw.clone()
        process_logits(processed, inputs, rows, order)
    column, best = _draw(processed, inputs, rows, order)
    is_wrong = best.isfinite().logical_not_()
    has_none_left = best == NEGATIVE_INFINITY
    if processed is not raw:
        is_raw_wrong = ~(raw.amax(dim=1) < float("inf"))  # amax hands a NaN on
        is_wrong |= is_raw_wrong
        has_none_left &= ~is_raw_wrong
    token_ids = column if order.token_ids is None else order.token_ids[column]
    token_ids = token_ids.masked_fill(is_wrong, PLACEHOLDER_TOKEN_ID)
    status = torch.full_like(is_wrong, STATUS_OK, dtype=torch.int32).masked_fill_(is_wrong, STATUS_NOT_FINITE)
    status.masked_fill_(has_none_left, STATUS_NO_TOKEN_LEFT)
    draws = SampleOutput(token_ids=token_ids, status=status)
    return draws if num_logprobs is None else with_logprobs(draws, raw, column, num_logprobs, order)


def _has_processors(inputs: SamplingInputs, rows: SamplingRows) -> bool:
    entries = (inputs.penalty_ids, inputs.bias_ids, inputs.ban_ids, inputs.bad_word_tokens)
    return rows.logit_mask is not None or any(flat.numel() for flat in entries)


def _draw(processed: Tensor, inputs: SamplingInputs, rows: SamplingRows, order: ColumnOrder) -> tuple[Tensor, Tensor]:
    """(column drawn, largest logit after temperature) of each row; the first of equals, so the lowest token id."""
    sequence, temperatures = rows.sequence.tolist(), inputs.temperature.tolist()
    noisy = [row for row, owner in enumerate(sequence) if not temperatures[owner] < GREEDY_TEMPERATURE]
    if len(noisy) == len(sequence):
        return _draw_with_noise(processed, inputs, rows, noisy, order)
    best, column = processed.max(dim=1)
    if noisy:
        some = torch.tensor(noisy, device=processed.device)
        column[some], best[some] = _draw_with_noise(processed[some], inputs, rows, noisy, order)
    return column, best


def _draw_with_noise(
    processed: Tensor, inputs: SamplingInputs, rows: SamplingRows, places: list[int], order: ColumnOrder
) -> tuple[Tensor, Tensor]:
    """Draw as `_draw` does, for the rows at `places`, which have a temperature: `processed` holds those only."""
    # On the host: looking up a few numbers costs less there than indexing a tensor.
    owners, token_indices = rows.sequence.tolist(), rows.token_index.tolist()
    temperatures, seeds = inputs.temperature.tolist(), inputs.seed.tolist()
    device = processed.device
    temperature = torch.tensor([temperatures[owners[place]] for place in places], device=device).unsqueeze(1)
    scaled = processed * (torch.ones_like(temperature) / temperature)
    vocab_size = scaled.shape[1] if order.column_of_token_id is None else order.column_of_token_id.numel()
    drawn = [seeds[owners[place]] for place in places], [token_indices[place] for place in places]
    if device.type == "cpu":
        noise = gumbel_rows(*drawn, vocab_size)
    else:
        seed, token_index = torch.tensor(drawn, device=device).unbind()
        noise = gumbel_from_bits(noise_bits(seed, token_index, vocab_size))
    if order.token_ids is not None:
        noise = noise[:, order.token_ids]
    # Both terms are float32, their sum is rounded once, to float64: the noise keeps its bits beside a large logit.
    score = scaled.double().add_(noise)
    if _has_filters(inputs):
        filters = FilterParams.of_rows(inputs, rows.sequence[torch.tensor(places, device=device)])
        assert filters is not None
        score.masked_fill_(~surviving_tokens(scaled, filters), NEGATIVE_INFINITY)
    return score.argmax(dim=1), scaled.amax(dim=1)


def _has_filters(inputs: SamplingInputs) -> bool:
    is_cut = any(inputs.top_k.tolist()) or any(inputs.min_p.tolist())
    return is_cut or any(top_p < 1.0 for top_p in inputs.top_p.tolist())


def gumbel_rows(seeds: list[int], token_indices: list[int], vocab_size: int) -> Tensor:
    """The noise of each (seed, token index): [R, vocab_size] float64, each value exactly a float32."""
    if not seeds:
        return torch.empty(0, vocab_size, dtype=torch.float64)
    places = [divmod(index, NOISE_ROWS) for index in token_indices]
    keys = [(seed, block, vocab_size) for seed, (block, _) in zip(seeds, places, strict=True)]
    blocks = _noise_blocks(keys)
    return torch.stack([blocks[key][place] for key, (_, place) in zip(keys, places, strict=True)])


_BlockKey = tuple[int, int, int]
"""Seed, block of token indices, size of the vocabulary."""
_kept: OrderedDict[_BlockKey, tuple[Tensor, ...]] = OrderedDict()
"""The latest blocks of noise, the longest unused first."""
_kept_lock = threading.Lock()


def _noise_blocks(keys: list[_BlockKey]) -> dict[_BlockKey, tuple[Tensor, ...]]:
    """The rows of each block: those of token indices block * NOISE_ROWS and on. Threads may call this at once."""
    vocab_size = keys[0][2]
    with _kept_lock:
        found = {key: _kept.get(key) for key in keys}
    missing = [key for key, rows in found.items() if rows is None]
    at_once = max(1, MADE_VALUES // (NOISE_ROWS * vocab_size))
    made: dict[_BlockKey, tuple[Tensor, ...]] = {}
    for start in range(0, len(missing), at_once):
        made |= _made_blocks(missing[start : start + at_once], vocab_size)
    blocks = {key: made[key] if rows is None else rows for key, rows in found.items()}
    with _kept_lock:
        _kept.update(blocks)
        for key in blocks:
            _kept.move_to_end(key)
        while len(_kept) > max(len(blocks), KEPT_VALUES // (NOISE_ROWS * vocab_size)):
            _kept.popitem(last=False)
    return blocks


def _made_blocks(keys: list[_BlockKey], vocab_size: int) -> dict[_BlockKey, tuple[Tensor, ...]]:
    first = torch.tensor([[seed, block * NOISE_ROWS] for seed, block, _ in keys])
    token_index = (first[:, 1:] + torch.arange(NOISE_ROWS)).flatten()
    bits = noise_bits(first[:, 0].repeat_interleave(NOISE_ROWS), token_index, vocab_size)
    blocks = gumbel_from_bits(bits).view(len(keys), NOISE_ROWS, vocab_size)
    # As float64 each block has memory of its own, so that the others' goes when they are no longer kept.
    return {key: block.double().unbind() for key, block in zip(keys, blocks, strict=True)}


def mask_logits(logits: Tensor, logit_mask: Tensor, mask_of_row: Tensor) -> None:
    """`MaskLogits`."""
    check_mask(logits, logit_mask, mask_of_row)
    is_banned = banned(logits, logit_mask, mask_of_row, ColumnOrder())
    logits.masked_fill_(is_banned & (logits < float("inf")), NEGATIVE_INFINITY)


def verify_draft_tokens(
    token_ids: Tensor,
    status: Tensor,
    first_row: Tensor,
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
) -> VerifyOutput:
    """`VerifyDraftTokens`. Sequences are few and short: counting on the host beats small tensor ops."""
    check_verify(token_ids, status, first_row, draft_token_ids, num_draft_tokens)
    drawn, row_status = token_ids.tolist(), status.tolist()
    width = draft_token_ids.shape[1]
    outputs, counts, last_rows = [], [], []
    sequences = zip(first_row.tolist(), draft_token_ids.tolist(), num_draft_tokens.tolist(), strict=True)
    for first, drafted, length in sequences:
        count = 0
        while count < length and drawn[first + count] == drafted[count] and row_status[first + count] == STATUS_OK:
            count += 1
        outputs.append([*drawn[first : first + count + 1], *[PLACEHOLDER_TOKEN_ID] * (width - count)])
        counts.append(count)
        last_rows.append(first + count)
    device = token_ids.device
    return VerifyOutput(
        output_token_ids=torch.tensor(outputs, dtype=torch.int64, device=device).view(len(outputs), width + 1),
        num_accepted_tokens=torch.tensor(counts, dtype=torch.int32, device=device),
        last_row=torch.tensor(last_rows, dtype=torch.int64, device=device),
        status=torch.tensor([row_status[row] for row in last_rows], dtype=torch.int32, device=device),
    )
