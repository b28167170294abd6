"""Scores of known tokens out of a step's hidden states, a few rows of logits at a time."""

from collections.abc import Callable

import numpy as np
import torch

from kimi_backend.config.step_memory import SCORED_ROWS
from kimi_backend.runners.host_transfer import Arrays, to_device
from kimi_backend.types.scoring import ScoringPlan, TokenScores
from kimi_kernels.sampling.logprobs import row_logprobs

_NAMES = ("score_logprobs", "score_ranks", "score_top_ids", "score_top_logprobs")


def score_tokens(
    compute_logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, plan: ScoringPlan
) -> dict[str, torch.Tensor]:
    """The entries of `TokenScores`, on the device, by names of their own.

    Args:
        compute_logits: [R, hidden_size] -> [R, vocab_size] float32; with several ranks, all of them call it alike.
        hidden: [T, hidden_size] of the step's rows, normed.
    """
    arrays = {"rows": plan.rows.astype(np.int64), "token_ids": plan.token_ids.astype(np.int64)}
    tensors = to_device(arrays, hidden.device)
    parts = [
        _score(compute_logits(hidden[rows]), token_ids, plan.num_top)
        for rows, token_ids in zip(*(torch.split(tensors[name], SCORED_ROWS) for name in arrays), strict=True)
    ]
    return {name: torch.cat(found) for name, found in zip(_NAMES, zip(*parts, strict=True), strict=True)}


def read_scores(arrays: Arrays) -> TokenScores | None:
    """Read what `score_tokens` gave, on the host; None where a step scored nothing."""
    if _NAMES[0] not in arrays:
        return None
    logprobs, ranks, top_ids, top_logprobs = (arrays[name] for name in _NAMES)
    return TokenScores(logprobs=logprobs, ranks=ranks, top_ids=top_ids, top_logprobs=top_logprobs)


def _score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    logprobs, top_logprobs, top_ids = row_logprobs(logits, token_ids, num_top)
    is_finite = logits.amax(dim=1) < float("inf")  # amax hands a NaN on
    ranks = (logits > logits.gather(1, token_ids[:, None])).sum(dim=1) + 1
    return logprobs.masked_fill(~is_finite, float("nan")), ranks, top_ids, top_logprobs
