"""The rows of a target step that draw a token, and the draft tokens that they check."""

from dataclasses import dataclass

import numpy as np

from kimi_backend.runners.host_transfer import Arrays
from kimi_backend.types.plan import PLACEHOLDER_TOKEN_ID, Int32Array, Int64Array, TargetPlan

FEW_SEQUENCES = 16
"""The most sequences whose rows are listed one by one."""


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
        """Find them in a checked plan: a sequence's last rows embed its newest token, then its draft tokens."""
        if len(plan.num_sampled_rows) <= FEW_SEQUENCES:
            return cls.of_few(plan)
        return cls.of_many(plan)

    @classmethod
    def of_few(cls, plan: TargetPlan) -> "SampledRows":
        """`of_many` one row after another: numpy takes longer to begin than Python for a few rows."""
        token_ids: list[int] = plan.rows.token_ids.tolist()
        width = max(int(plan.num_sampled_rows.max(initial=1)) - 1, 0)
        sampled_rows: list[int] = []
        sequence: list[int] = []
        token_index: list[int] = []
        window_len: list[int] = []
        windows: list[list[int]] = []
        num_draft_tokens: list[int] = []
        first_row: list[int] = []
        end = 0
        for query_len, seq_len, count in zip(
            plan.rows.query_lens.tolist(), plan.rows.seq_lens.tolist(), plan.num_sampled_rows.tolist(), strict=True
        ):
            end += query_len
            if not count:
                continue
            sequence += [len(first_row)] * count
            first_row.append(len(sampled_rows))
            num_draft_tokens.append(count - 1)
            sampled_rows += range(end - count, end)
            token_index += range(seq_len - count + 1, seq_len + 1)
            window_len += range(count)
            drafted = token_ids[end - count + 1 : end]
            windows.append(drafted + [PLACEHOLDER_TOKEN_ID] * (width - len(drafted)))
        return cls(
            sampled_rows=np.array(sampled_rows, np.int64),
            sequence=np.array(sequence, np.int64),
            token_index=np.array(token_index, np.int64),
            window_len=np.array(window_len, np.int32),
            window_token_ids=np.array(windows, np.int32).reshape(len(windows), width),
            num_draft_tokens=np.array(num_draft_tokens, np.int32),
            first_row=np.array(first_row, np.int64),
        )

    @classmethod
    def of_many(cls, plan: TargetPlan) -> "SampledRows":
        """Do what `of` does, for any number of sequences at the price of some twenty array operations."""
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
        """The arrays by name, for `host_transfer.to_device`."""
        return {name: getattr(self, name) for name in self.__slots__}


def mask_of_row(masked_rows: Int32Array, num_rows: int) -> Int32Array:
    """[num_rows] which mask each sampled row has, -1 for none. masked_rows: [M] the row of each mask."""
    places = np.full(num_rows, -1, np.int32)
    places[masked_rows] = np.arange(len(masked_rows), dtype=np.int32)
    return places


def window_rows(plan: TargetPlan, width: int) -> Int64Array:
    """[B, width] row of the step that embeds each draft token under verification; -1 after a sequence's last."""
    counts = plan.num_sampled_rows[plan.num_sampled_rows > 0]
    ends = np.cumsum(plan.rows.query_lens, dtype=np.int64)[plan.num_sampled_rows > 0]
    columns = np.arange(width)
    return np.where(columns < (counts - 1)[:, None], (ends - counts + 1)[:, None] + columns, -1)
