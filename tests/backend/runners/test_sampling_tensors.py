"""Sampling parameters go to the device once for every object that a plan brings."""

import numpy as np
import pytest
import torch

from kimi_backend.runners.sampling_tensors import SamplingUpload, has_processors
from kimi_backend.types.plan import SamplingPlan


def test_another_object_is_uploaded_again() -> None:
    upload = SamplingUpload(torch.device("cpu"))
    cool, warm = SamplingPlan.plain(2, temperature=0.5, seed=7), SamplingPlan.plain(2, temperature=1.5, seed=9)
    first = upload.inputs(cool)
    assert upload.inputs(cool) is first
    second = upload.inputs(warm)
    assert (second.temperature.tolist(), second.seed.tolist()) == ([1.5, 1.5], [9, 9])
    assert upload.inputs(cool).temperature.tolist() == [0.5, 0.5]


MOVING = [
    *({"repetition_penalty": value} for value in (0.5, 2.0)),
    *({name: value} for name in ("frequency_penalty", "presence_penalty") for value in (-1.0, 1.0)),
    *({name: np.zeros(1, np.int32)} for name in ("bias_ids", "ban_ids", "bad_word_tokens")),
]


@pytest.mark.parametrize("fields", MOVING)
def test_what_moves_logits_is_told(fields: dict[str, object]) -> None:
    plain, moving = SamplingPlan.plain(2, temperature=0.5, top_p=0.3, top_k=4), SamplingPlan.plain(2, **fields)
    assert (has_processors(plain), has_processors(moving)) == (False, True)
    upload = SamplingUpload(torch.device("cpu"))
    assert [upload.moves_logits(plan) for plan in (moving, plain, moving, moving)] == [True, False, True, True]
