"""The tokens that a sequence holds and how often, which penalties need, kept up to date token by token."""

from collections.abc import Iterable

import numpy as np

from kimi_backend.types.plan import BoolArray, Int32Array


class PenaltyCounts:
    """Distinct token ids of one sequence in order of first use, as arrays that a plan can copy from."""

    def __init__(self, prompt_token_ids: Int32Array) -> None:
        ids = np.unique(prompt_token_ids).astype(np.int32)
        self._num_ids = len(ids)
        capacity = max(64, 2 * len(ids))
        self._ids = np.zeros(capacity, np.int32)
        self._counts = np.zeros(capacity, np.int32)
        self._in_prompt = np.zeros(capacity, np.bool_)
        self._ids[: len(ids)] = ids
        self._in_prompt[: len(ids)] = True
        self._index = {token_id: index for index, token_id in enumerate(ids.tolist())}

    @property
    def token_ids(self) -> Int32Array:
        return self._ids[: self._num_ids]

    @property
    def counts(self) -> Int32Array:
        """The number of times that each stands in the output."""
        return self._counts[: self._num_ids]

    @property
    def in_prompt(self) -> BoolArray:
        return self._in_prompt[: self._num_ids]

    def add_output(self, token_ids: Iterable[int]) -> None:
        """Count tokens that were appended to the output."""
        for token_id in token_ids:
            index = self._index.get(token_id)
            if index is None:
                index = self._insert(token_id)
            self._counts[index] += 1

    def _insert(self, token_id: int) -> int:
        index = self._num_ids
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._in_prompt = np.concatenate([self._in_prompt, np.zeros_like(self._in_prompt)])
        self._ids[index] = token_id
        self._index[token_id] = index
        self._num_ids = index + 1
        return index
