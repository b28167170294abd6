"""Plans of sampling parameters for tests that write step plans by hand."""

from typing import Any

import numpy as np

from kimi_backend.types.plan import SamplingPlan


def sampling_plan(num_sequences: int, **fields: Any) -> SamplingPlan:
    """Greedy, nothing set, for num_sequences. `fields` replace arrays; a scalar stands for every sequence."""
    count = num_sequences
    arrays: dict[str, Any] = {
        "temperature": np.zeros(count, np.float32),
        "top_k": np.zeros(count, np.int32),
        "top_p": np.ones(count, np.float32),
        "min_p": np.zeros(count, np.float32),
        "seed": np.zeros(count, np.int64),
        "repetition_penalty": np.ones(count, np.float32),
        "frequency_penalty": np.zeros(count, np.float32),
        "presence_penalty": np.zeros(count, np.float32),
        "penalty_offsets": np.zeros(count + 1, np.int32),
        "penalty_ids": np.empty(0, np.int32),
        "penalty_counts": np.empty(0, np.int32),
        "penalty_in_prompt": np.empty(0, np.bool_),
        "bias_offsets": np.zeros(count + 1, np.int32),
        "bias_ids": np.empty(0, np.int32),
        "bias_values": np.empty(0, np.float32),
        "ban_offsets": np.zeros(count + 1, np.int32),
        "ban_ids": np.empty(0, np.int32),
        "ban_until": np.empty(0, np.int64),
        "bad_word_offsets": np.zeros(count + 1, np.int32),
        "bad_word_token_offsets": np.zeros(1, np.int32),
        "bad_word_tokens": np.empty(0, np.int32),
        "history_tail": np.full((count, 1), -1, np.int32),
    }
    for name, value in fields.items():
        arrays[name] = np.full(count, value, arrays[name].dtype) if np.isscalar(value) else value
    return SamplingPlan(**arrays)
