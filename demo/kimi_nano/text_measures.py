"""Measures of the target's texts, and of what guessing without a draft would get accepted."""

import gzip
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_nano.acceptance import Acceptance

LOOP_TIMES = 3
LOOP_TOKENS = 24
"""A text loops when it ends in the same run of tokens `LOOP_TIMES` times over, and for at least so many tokens."""
LONGEST_LOOKUP = 4


def distinct_4gram_share(token_ids: Sequence[int]) -> float:
    """Distinct 4-grams over all 4-grams of one text; 1 where nothing repeats."""
    grams = [tuple(token_ids[i : i + 4]) for i in range(len(token_ids) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def ends_in_loop(token_ids: Sequence[int]) -> bool:
    """Tell whether one text ends in a run of tokens again and again, see `LOOP_TOKENS`."""
    count = len(token_ids)
    for period in range(1, count // LOOP_TIMES + 1):
        length = max(LOOP_TIMES * period, LOOP_TOKENS)
        if length <= count and token_ids[count - length + period :] == token_ids[count - length : count - period]:
            return True
    return False


def is_looping(written: Tensor) -> Tensor:
    """[B] bool for texts [B, G]."""
    return torch.tensor([ends_in_loop(ids) for ids in written.tolist()])


def gzip_nats_per_byte(texts: Sequence[bytes]) -> tuple[float, float]:
    """Count what gzip -9 needs: each text by itself, and all in one stream."""
    num_bytes = sum(map(len, texts))
    alone = sum(len(gzip.compress(text, 9, mtime=0)) for text in texts)
    together = len(gzip.compress(b"".join(texts), 9, mtime=0))
    return alone * 8 * math.log(2) / num_bytes, together * 8 * math.log(2) / num_bytes


def lookup_draft(context: Sequence[int], num_draft_tokens: int) -> list[int]:
    """Prompt lookup: what followed the last earlier occurrence of the longest matching end of the context."""
    for length in range(min(LONGEST_LOOKUP, len(context) - 1), 0, -1):
        end = list(context[-length:])
        for start in range(len(context) - length - 1, -1, -1):
            if list(context[start : start + length]) == end:
                return list(context[start + length : start + length + num_draft_tokens])
    return []


def lookup_acceptance(prompts: Sequence[Sequence[int]], generated: Tensor, num_draft_tokens: int) -> Acceptance:
    """Acceptance of `lookup_draft` on texts that the target wrote, in the rounds of `acceptance.measure`."""
    count = generated.shape[1]
    reached = torch.zeros(len(prompts), num_draft_tokens + 1, dtype=torch.float64)
    for row, (prompt, written) in enumerate(zip(prompts, generated.tolist(), strict=True)):
        place = 0
        while place + 1 + num_draft_tokens <= count:
            guesses = lookup_draft([*prompt, *written[: place + 1]], num_draft_tokens)
            wanted = written[place + 1 : place + 1 + num_draft_tokens]
            number = next((i for i, guess in enumerate(guesses) if guess != wanted[i]), len(guesses))
            reached[row, : number + 1] += 1
            place += number + 1
    return Acceptance(reached)
