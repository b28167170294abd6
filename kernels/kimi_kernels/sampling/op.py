"""Drawing tokens, and accepting a draft's: the contracts.

Dimensions: R rows to sample, B sequences, W columns of the table of draft tokens.
"""

from typing import Protocol

import torch
from torch import Tensor

from kimi_kernels.argument_checks import refuse, require_columns, require_dtype, require_shape
from kimi_kernels.sampling_inputs import (
    SampleOutput,
    SamplingInputs,
    SamplingRows,
    VerifyOutput,
    VocabularyMap,
)


class SampleTokens(Protocol):
    """Draw one token a row: argmax over the processed distribution of log p(x) + gumbel(seed, i, x)
    (docs/architecture.md, "Sampling"; Gumbel coupling: Daliri et al. 2024, arXiv 2408.07978)."""

    def __call__(
        self,
        logits: Tensor,
        inputs: SamplingInputs,
        rows: SamplingRows,
        vocabulary_map: VocabularyMap | None = None,
        num_logprobs: int | None = None,
    ) -> SampleOutput:
        """
        Args:
            logits: [R, vocab_size] (or [R, num_columns] with a map) float32, bf16 or float16; unchanged.
            num_logprobs: None: no logprobs; n: the drawn token's and the n most likely.
        """
        ...


class MaskLogits(Protocol):
    """Rule tokens out, in place: a row's logits of tokens that it may not draw become -inf, but for NaN and +inf, so
    that bad logits are noticed."""

    def __call__(self, logits: Tensor, logit_mask: Tensor, mask_of_row: Tensor) -> None:
        """
        Args:
            logits: [R, vocab_size] float32, contiguous.
            logit_mask, mask_of_row: see `SamplingRows`; rows without a mask cost next to nothing.
        """
        ...


class VerifyDraftTokens(Protocol):
    """Accept draft tokens while they equal what the target drew."""

    def __call__(
        self,
        token_ids: Tensor,
        status: Tensor,
        first_row: Tensor,
        draft_token_ids: Tensor,
        num_draft_tokens: Tensor,
    ) -> VerifyOutput:
        """
        Args:
            token_ids, status: [R], as sampled; sequence b has num_draft_tokens[b] + 1 rows, from first_row[b].
            first_row: [B] int64.
            draft_token_ids: [B, W] int32. num_draft_tokens: [B] int32, at most W.
        """
        ...


def check_sample(logits: Tensor, rows: SamplingRows, vocabulary_map: VocabularyMap | None) -> None:
    """Raise unless the logits are a matrix with a row for each of `rows`, and columns for the map and the masks."""
    if logits.dim() != 2 or logits.shape[0] != rows.sequence.shape[0]:
        require_shape("logits", logits, rows.sequence.shape[0], None)
    require_dtype("logits", logits, torch.float32, torch.bfloat16, torch.float16)
    num_tokens = logits.shape[1]
    if vocabulary_map is not None:
        require_shape("vocabulary_map.token_id_of_column", vocabulary_map.token_id_of_column, num_tokens)
        num_tokens = vocabulary_map.column_of_token_id.shape[0]
    if rows.logit_mask is not None:
        assert rows.mask_of_row is not None
        check_masks(logits.shape[0], num_tokens, rows.logit_mask, rows.mask_of_row)


def check_mask(logits: Tensor, logit_mask: Tensor, mask_of_row: Tensor) -> None:
    """Raise unless the arguments are those of `MaskLogits`."""
    require_shape("logits", logits, None, None)
    require_dtype("logits", logits, torch.float32)
    if not logits.is_contiguous():
        refuse("logits", logits.stride(), "contiguous rows")
    check_masks(logits.shape[0], logits.shape[1], logit_mask, mask_of_row)


def check_masks(num_rows: int, num_tokens: int, logit_mask: Tensor, mask_of_row: Tensor) -> None:
    """Raise unless each row has a mask or -1, and each mask a bit for each token."""
    require_shape("mask_of_row", mask_of_row, num_rows)
    require_shape("logit_mask", logit_mask, logit_mask.shape[0], None)
    num_words = (num_tokens + 31) // 32
    if logit_mask.shape[1] < num_words:
        refuse("logit_mask", f"{logit_mask.shape[1]} words", f"at least {num_words}")


def check_verify(
    token_ids: Tensor, status: Tensor, first_row: Tensor, draft_token_ids: Tensor, num_draft_tokens: Tensor
) -> None:
    """Raise unless the arguments are those of `VerifyDraftTokens`."""
    require_shape("draft_token_ids", draft_token_ids, None, None)
    num_seqs = draft_token_ids.shape[0]
    require_shape("first_row", first_row, num_seqs)
    require_shape("num_draft_tokens", num_draft_tokens, num_seqs)
    require_shape("status", status, token_ids.shape[0])
    if draft_token_ids.shape[1]:
        require_columns("draft_token_ids", draft_token_ids)
