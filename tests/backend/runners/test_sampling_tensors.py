"""Sampling parameters go to the device once for every object that a plan brings."""

import torch

from kimi_backend.runners.sampling_tensors import SamplingUpload
from kimi_backend.types.plan import SamplingPlan


def test_another_object_is_uploaded_again() -> None:
    upload = SamplingUpload(torch.device("cpu"))
    cool, warm = SamplingPlan.plain(2, temperature=0.5, seed=7), SamplingPlan.plain(2, temperature=1.5, seed=9)
    first = upload.inputs(cool)
    assert upload.inputs(cool) is first
    second = upload.inputs(warm)
    assert (second.temperature.tolist(), second.seed.tolist()) == ([1.5, 1.5], [9, 9])
    assert upload.inputs(cool).temperature.tolist() == [0.5, 0.5]
