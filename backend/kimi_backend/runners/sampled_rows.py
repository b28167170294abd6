"""Which rows of a target step draw a token, and which draft tokens they check."""

from dataclasses import dataclass

import numpy as np

from kimi_backend.runners.host_transfer import Arrays
from kimi_backend.runners.left_tokens import window_rows
from kimi_backend.types.plan import PLACEHOLDER_TOKEN_ID, Int32Array, Int64Array, TargetPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """R rows of B sequences; a sequence's rows stand together, in order."""

    sampled_rows: Int64Array
    """[R] row of the step."""
    sequence: Int64Array
    """[R] which of the B sequences."""
    token_index: Int64Array
    """[R] index of the token drawn: one past the row's position."""
    window_len: Int32Array
    """[R] draft tokens of its sequence that stand before the draw."""
    window_token_ids: Int32Array
    """[B, W] draft tokens under verification, PLACEHOLDER_TOKEN_ID after a sequence's last."""
    num_draft_tokens: Int32Array
    """[B]"""
    first_row: Int64Array
    """[B] index of a sequence's first row among the R."""

    @classmethod
    def of(cls, plan: TargetPlan) -> "SampledRows":
        """From a checked plan: a sequence's last rows embed its newest token, then its draft tokens."""
        is_sampling = plan.num_sampled_rows > 0
        counts = plan.num_sampled_rows[is_sampling].astype(np.int64)
        ends = np.cumsum(plan.rows.query_lens, dtype=np.int64)[is_sampling]
        first_row = np.cumsum(counts) - counts
        sequence = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(sequence)) - first_row[sequence]
        rows = window_rows(plan, int(counts.max(initial=1)) - 1)
        window = np.where(rows >= 0, plan.rows.token_ids[rows], PLACEHOLDER_TOKEN_ID)
        seq_lens = plan.rows.seq_lens[is_sampling]
        return cls(
            sampled_rows=(ends - counts)[sequence] + place,
            sequence=sequence,
            token_index=(seq_lens - counts + 1)[sequence] + place,
            window_len=place.astype(np.int32),
            window_token_ids=window.astype(np.int32),
            num_draft_tokens=(counts - 1).astype(np.int32),
            first_row=first_row,
        )

    @property
    def num_rows(self) -> int:
        return len(self.sampled_rows)

    def arrays(self) -> Arrays:
        """By name, for `host_transfer.to_device`."""
        return {name: getattr(self, name) for name in self.__slots__}
