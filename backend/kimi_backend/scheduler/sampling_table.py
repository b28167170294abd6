"""Sampling parameters of running sequences by table row, and the plan's arrays cut from them."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kimi_backend.scheduler.sequence import Sequence
from kimi_backend.types.plan import PLACEHOLDER_TOKEN_ID, FloatArray, Int32Array, Int64Array, SamplingPlan
from kimi_backend.types.request import SamplingParams

BANNED_FOREVER = 2**31 - 1
"""A ban that no token index reaches; the sampling ops' constant of the same name."""

_NO_INT32 = np.zeros(0, np.int32)
_NO_INT64 = np.zeros(0, np.int64)
_NO_FLOATS = np.zeros(0, np.float32)
_NO_BOOLS = np.zeros(0, np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RequestArrays:
    """The arrays that a request brings in lists of any length; built once, when it starts."""

    bias_ids: Int32Array
    bias_values: FloatArray
    ban_ids: Int32Array
    ban_until: Int64Array
    word_lens: Int32Array
    word_tokens: Int32Array
    tail_len: int


class SamplingTable:
    """One row for each running sequence. `version` grows whenever a row gets a new owner."""

    def __init__(self, num_rows: int) -> None:
        self.version = 0
        self.temperature = np.ones(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.int64)
        self.repetition_penalty = np.ones(num_rows, np.float32)
        self.frequency_penalty = np.zeros(num_rows, np.float32)
        self.presence_penalty = np.zeros(num_rows, np.float32)
        self.arrays: list[_RequestArrays | None] = [None] * num_rows

    def set_row(self, row: int, sequence: Sequence) -> None:
        """Give a row to a sequence that starts."""
        params = sequence.params
        self.version += 1
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = sequence.seed - 2**64 if sequence.seed >= 2**63 else sequence.seed
        self.repetition_penalty[row] = params.repetition_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.arrays[row] = _request_arrays(params, sequence)


class SamplingPlanBuilder:
    """Cuts `SamplingPlan`s for one of the models. What does not change from step to step is cut once per batch."""

    def __init__(self, table: SamplingTable) -> None:
        self._table = table
        self._version = -1
        self._rows = b""
        self._fixed: SamplingPlan | None = None
        self._changes = False

    def build(self, rows: Int64Array, sequences: list[Sequence]) -> SamplingPlan:
        """
        Args:
            rows: [B] table rows of the sampling sequences, in plan order.
            sequences: the same sequences.
        """
        key = rows.tobytes()
        if self._fixed is None or key != self._rows or self._table.version != self._version:
            self._fixed = _fixed_plan(self._table, rows)
            self._rows, self._version = key, self._table.version
            self._changes = len(self._fixed.bad_word_tokens) > 0 or any(s.penalties is not None for s in sequences)
        if not self._changes:
            return self._fixed
        counts = [s.penalties for s in sequences]
        return replace(
            self._fixed,
            penalty_offsets=_offsets([0 if c is None else len(c.token_ids) for c in counts]),
            penalty_ids=_joined([c.token_ids for c in counts if c is not None], _NO_INT32),
            penalty_counts=_joined([c.counts for c in counts if c is not None], _NO_INT32),
            penalty_in_prompt=_joined([c.in_prompt for c in counts if c is not None], _NO_BOOLS),
            history_tail=self._history_tail(rows, sequences),
        )

    def _history_tail(self, rows: Int64Array, sequences: list[Sequence]) -> Int32Array:
        tail_lens = [arrays.tail_len if (arrays := self._table.arrays[row]) else 0 for row in rows.tolist()]
        width = max(tail_lens)
        tail = np.full((len(sequences), width), PLACEHOLDER_TOKEN_ID, np.int32)
        for index, (sequence, tail_len) in enumerate(zip(sequences, tail_lens, strict=True)):
            if tail_len:
                last = sequence.token_ids[-tail_len:]
                tail[index, width - len(last) :] = last
        return tail


def _request_arrays(params: SamplingParams, sequence: Sequence) -> _RequestArrays | None:
    ban_until = {word[0]: BANNED_FOREVER for word in params.bad_words if len(word) == 1}
    if params.min_tokens:
        for token_id in sorted(sequence.stop_token_ids):
            ban_until.setdefault(token_id, sequence.num_prompt_tokens + params.min_tokens)
    words = [word for word in params.bad_words if len(word) > 1]
    if not (ban_until or words or params.logit_bias):
        return None
    return _RequestArrays(
        bias_ids=np.array(list(params.logit_bias), np.int32),
        bias_values=np.array(list(params.logit_bias.values()), np.float32),
        ban_ids=np.array(list(ban_until), np.int32),
        ban_until=np.array(list(ban_until.values()), np.int64),
        word_lens=np.array([len(word) for word in words], np.int32),
        word_tokens=np.array([token_id for word in words for token_id in word], np.int32),
        tail_len=max((len(word) - 1 for word in words), default=0),
    )


def _fixed_plan(table: SamplingTable, rows: Int64Array) -> SamplingPlan:
    arrays = [table.arrays[row] for row in rows.tolist()]
    present = [a for a in arrays if a is not None]
    none = np.zeros(len(rows) + 1, np.int32)
    return SamplingPlan(
        temperature=table.temperature[rows],
        top_k=table.top_k[rows],
        top_p=table.top_p[rows],
        min_p=table.min_p[rows],
        seed=table.seed[rows],
        repetition_penalty=table.repetition_penalty[rows],
        frequency_penalty=table.frequency_penalty[rows],
        presence_penalty=table.presence_penalty[rows],
        penalty_offsets=none,
        penalty_ids=_NO_INT32,
        penalty_counts=_NO_INT32,
        penalty_in_prompt=_NO_BOOLS,
        bias_offsets=_offsets([len(a.bias_ids) if a else 0 for a in arrays]) if present else none,
        bias_ids=_joined([a.bias_ids for a in present], _NO_INT32),
        bias_values=_joined([a.bias_values for a in present], _NO_FLOATS),
        ban_offsets=_offsets([len(a.ban_ids) if a else 0 for a in arrays]) if present else none,
        ban_ids=_joined([a.ban_ids for a in present], _NO_INT32),
        ban_until=_joined([a.ban_until for a in present], _NO_INT64),
        bad_word_offsets=_offsets([len(a.word_lens) if a else 0 for a in arrays]) if present else none,
        bad_word_token_offsets=_offsets(_joined([a.word_lens for a in present], _NO_INT32)),
        bad_word_tokens=_joined([a.word_tokens for a in present], _NO_INT32),
        history_tail=np.zeros((len(rows), 0), np.int32),
    )


def _offsets(counts: list[int] | Int32Array) -> Int32Array:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _joined(parts: list[npt.NDArray[Any]], empty: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else empty
