"""Scores of known tokens: what a step is asked of them, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringPlan:
    """N rows of a target step whose next token is known and is to be scored."""

    packed_whole: ClassVar[bool] = True
    """See `types.codec`."""

    rows: npt.NDArray[np.int32]
    """[N] rows of the step, rising."""
    token_ids: npt.NDArray[np.int32]
    """[N] the token that follows each."""
    num_top: int
    """The number of most likely tokens to tell beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Scores of N tokens, each under the distribution of the row before it: raw, before every processor."""

    packed_whole: ClassVar[bool] = True

    logprobs: npt.NDArray[np.float32]
    """[N]; NaN where the row's logits were not finite."""
    ranks: npt.NDArray[np.int64]
    """[N] 1 and how many tokens are likelier."""
    top_ids: npt.NDArray[np.int64]
    """[N, num_top], most likely first, the lowest id first among equals."""
    top_logprobs: npt.NDArray[np.float32]
    """[N, num_top]"""

    @classmethod
    def joined(cls, parts: Sequence["TokenScores"], num_top: int) -> "TokenScores":
        """All tokens of some parts, each of which tells `num_top` of the most likely ones."""
        return cls(
            logprobs=np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)]),
            ranks=np.concatenate([np.empty(0, np.int64), *(part.ranks for part in parts)]),
            top_ids=np.concatenate([np.empty((0, num_top), np.int64), *(part.top_ids for part in parts)]),
            top_logprobs=np.concatenate([np.empty((0, num_top), np.float32), *(p.top_logprobs for p in parts)]),
        )

    def __len__(self) -> int:
        return len(self.logprobs)

    def part(self, start: int, stop: int, num_top: int) -> "TokenScores":
        """Some of the tokens, with the first `num_top` of the most likely ones."""
        return TokenScores(
            logprobs=self.logprobs[start:stop],
            ranks=self.ranks[start:stop],
            top_ids=self.top_ids[start:stop, :num_top],
            top_logprobs=self.top_logprobs[start:stop, :num_top],
        )
