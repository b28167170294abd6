"""The rows of a step that score a prompt's tokens, and the scores of one prompt, chunk by chunk.

Row p of a prompt scores the token at p + 1, so the first token has no score. A row whose KV is cached has no
hidden state any more: a prompt that wants scores is computed whole, and what it computes is published as any other's.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from kimi_backend.types.plan import Int32Array
from kimi_backend.types.scoring import ScoringPlan, TokenScores

if TYPE_CHECKING:
    from kimi_backend.scheduler.sequence import Sequence


class PromptScores:
    """The scores of one request's prompt, as they come."""

    def __init__(self, num_tokens: int, num_top: int) -> None:
        """
        Args:
            num_tokens: of the prompt.
            num_top: most likely tokens to tell beside each.
        """
        self.num_top = num_top
        self._num_wanted = num_tokens - 1
        self._num_scored = 0
        self._parts: list[TokenScores] = []
        self._is_taken = False

    @property
    def is_complete(self) -> bool:
        return self._num_scored == self._num_wanted

    def rows_of_chunk(self, start: int, stop: int) -> range:
        """The positions of a chunk that score a token. After a preemption those that were scored do not again."""
        return range(max(start, self._num_scored), min(stop, self._num_wanted))

    def add(self, scores: TokenScores) -> None:
        """Take the next tokens' scores."""
        self._parts.append(scores)
        self._num_scored += len(scores)

    def take(self) -> TokenScores | None:
        """All scores, once they are complete; None before, and when they were taken."""
        if self._is_taken or not self.is_complete:
            return None
        parts, self._parts, self._is_taken = self._parts, [], True
        return TokenScores.joined(parts, self.num_top)


def scoring_plan(sequences: Iterable["Sequence"], query_lens: Int32Array) -> ScoringPlan | None:
    """The rows of a step, the sequences' one after another, that score a token; None where none does.

    Args:
        query_lens: [S] rows of each sequence, from its `target_len` on.
    """
    rows: list[Int32Array] = []
    token_ids: list[Int32Array] = []
    num_top, first_row = 0, 0
    for sequence, count in zip(sequences, query_lens.tolist(), strict=True):
        start, scores = sequence.target_len, sequence.scores
        if scores is not None and (scored := scores.rows_of_chunk(start, start + count)):
            rows.append(np.arange(scored.start, scored.stop, dtype=np.int32) + np.int32(first_row - start))
            token_ids.append(sequence.token_ids[scored.start + 1 : scored.stop + 1])
            num_top = max(num_top, scores.num_top)
        first_row += count
    if not rows:
        return None
    return ScoringPlan(rows=np.concatenate(rows), token_ids=np.concatenate(token_ids), num_top=num_top)


def scores_by_sequence(
    sequences: Iterable["Sequence"], query_lens: Int32Array, plan: ScoringPlan, scores: TokenScores
) -> list[TokenScores | None]:
    """Return what a step's rows scored of each sequence's prompt; None where they scored none."""
    ends = np.searchsorted(plan.rows, np.cumsum(query_lens)).tolist()
    found: list[TokenScores | None] = []
    for sequence, start, end in zip(sequences, [0, *ends], ends, strict=False):
        prompt = sequence.scores
        found.append(None if prompt is None or start == end else scores.part(start, end, prompt.num_top))
    return found
