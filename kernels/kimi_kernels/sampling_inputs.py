"""Tensors that the sampling ops read: parameters a sequence, rows, and what is to be drawn.

B sequences sample in a step, R rows in all (a verify samples 1 + num_draft_tokens rows of one sequence).
"CSR" pairs `x_offsets` [B + 1] int32 with flat arrays: sequence b owns entries `x_offsets[b]` to `x_offsets[b + 1]`.
All token ids are ids of the *target's* vocabulary, for the draft too.
"""

from dataclasses import dataclass

import torch

PLACEHOLDER_TOKEN_ID = -1
GREEDY_TEMPERATURE = 1e-5
"""A temperature below this means argmax."""
BANNED_FOREVER = 2**31 - 1

STATUS_OK = 0
STATUS_NOT_FINITE = 1
"""A row's logits held NaN or +inf, or became infinite by the processors."""
STATUS_NO_TOKEN_LEFT = 2
"""A row's logits were finite, and bans, masks and logits of -inf left no token to draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """Sampling parameters of B sequences. Processors run in this order: penalties, bias, bans, temperature, min-p,
    top-k, top-p."""

    temperature: torch.Tensor
    """[B] float32; below GREEDY_TEMPERATURE: argmax, and min-p, top-k, top-p do not matter."""
    top_k: torch.Tensor
    """[B] int32; 0 keeps all."""
    top_p: torch.Tensor
    """[B] float32; 1 keeps all."""
    min_p: torch.Tensor
    """[B] float32; 0 keeps all."""
    seed: torch.Tensor
    """[B] int64, the bits of a uint64."""
    repetition_penalty: torch.Tensor
    """[B] float32; 1 is off. Applies to tokens of the prompt and of the output."""
    frequency_penalty: torch.Tensor
    """[B] float32; 0 is off. Times the count in the output."""
    presence_penalty: torch.Tensor
    """[B] float32; 0 is off. Once for a token in the output."""

    penalty_offsets: torch.Tensor
    penalty_ids: torch.Tensor
    """[.] int32, CSR: the distinct token ids before the window, for sequences that use a penalty. A sequence without
    entries gets no penalty, its window neither (a prompt is never empty, so this takes nothing from anyone)."""
    penalty_counts: torch.Tensor
    """[.] int32: how often each stands in the output before the window."""
    penalty_in_prompt: torch.Tensor
    """[.] bool: whether it stands in the prompt."""

    bias_offsets: torch.Tensor
    bias_ids: torch.Tensor
    """[.] int32, CSR, distinct within a sequence."""
    bias_values: torch.Tensor
    """[.] float32."""

    ban_offsets: torch.Tensor
    ban_ids: torch.Tensor
    """[.] int32, CSR: tokens that may not be drawn ..."""
    ban_until: torch.Tensor
    """[.] int64: ... at token indices below this (min_tokens bans stop tokens; BANNED_FOREVER for single bad words)."""

    bad_word_offsets: torch.Tensor
    """[B + 1] int32, CSR over words of two or more tokens."""
    bad_word_token_offsets: torch.Tensor
    """[num_words + 1] int32, CSR of words over `bad_word_tokens`."""
    bad_word_tokens: torch.Tensor
    """[.] int32: a word's last token is banned where the tokens before the row end in all its others."""
    history_tail: torch.Tensor
    """[B, max_tail] int32: the last tokens before the window, right-aligned, PLACEHOLDER_TOKEN_ID to the left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """The sequence that each row of logits belongs to and the token it draws."""

    sequence: torch.Tensor
    """[R] int64, index into the B sequences, non-decreasing."""
    token_index: torch.Tensor
    """[R] int64, index i of the token being drawn (target row p draws i = p + 1, draft row p draws i = p + 2)."""
    window_token_ids: torch.Tensor
    """[B, W] int32: tokens that follow the committed ones provisionally (the draft tokens under verification)."""
    window_len: torch.Tensor
    """[R] int32: how many of its sequence's window tokens stand before this row's draw (penalties, bad words)."""
    logit_mask: torch.Tensor | None = None
    """[M, ceil(vocab_size / 32)] int32: bit x % 32 of word x // 32 set allows token x. None allows all."""
    mask_of_row: torch.Tensor | None = None
    """[R] int32: which of the M masks each row has, -1 for none; there where `logit_mask` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyMap:
    """Columns of draft logits against the target's token ids."""

    token_id_of_column: torch.Tensor
    """[num_columns] int64."""
    column_of_token_id: torch.Tensor
    """[vocab_size] int64, -1 where the draft has no such token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """The draws of R rows."""

    token_ids: torch.Tensor
    """[R] int64, target ids; PLACEHOLDER_TOKEN_ID where the status is not STATUS_OK."""
    status: torch.Tensor
    """[R] int32: STATUS_OK, STATUS_NOT_FINITE or STATUS_NO_TOKEN_LEFT."""
    logprobs: torch.Tensor | None = None
    """[R] float32: log-softmax of the raw logits at the drawn token, when asked for."""
    top_logprob_ids: torch.Tensor | None = None
    """[R, num_logprobs] int64, most likely first, lowest id first among equals."""
    top_logprobs: torch.Tensor | None = None
    """[R, num_logprobs] float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOutput:
    """The draft tokens that survive."""

    output_token_ids: torch.Tensor
    """[B, W + 1] int64: accepted draft tokens, the target's own (recovered or bonus), then PLACEHOLDER_TOKEN_ID."""
    num_accepted_tokens: torch.Tensor
    """[B] int32, the target's own token not counted."""
    last_row: torch.Tensor
    """[B] int64: index into the R rows of the row that drew the target's own token."""
    status: torch.Tensor
    """[B] int32: the first non-zero status among the rows that were used, else STATUS_OK."""
