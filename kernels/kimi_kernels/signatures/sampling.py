"""Drawing tokens, and accepting a draft's.

Dimensions: R rows to sample, B sequences, W columns of the table of draft tokens.
"""

from typing import Protocol

from torch import Tensor

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
            logits: [R, vocab_size] (or [R, num_columns] with a map) float32 or bf16; unchanged.
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
