"""A recording reads what its function holds, whatever is allocated afterwards."""

import gc
import weakref

import pytest
import torch

from kimi_backend.runners.graphs.recorder import EagerRecorder, GraphRecorder, Recorder, Run


def record_a_sum(recorder: Recorder, device: torch.device, into: torch.Tensor) -> tuple[Run, weakref.ref[torch.Tensor]]:
    """A recording of `into` += a tensor of ones that nobody else holds, and a view of that tensor's life."""
    ones = torch.ones(1 << 20, device=device)

    def run() -> None:
        into.add_(ones)

    return recorder.record(run), weakref.ref(ones)


def check(recorder: Recorder, device: torch.device) -> None:
    into = torch.zeros(1 << 20, device=device)
    recording, ones = record_a_sum(recorder, device, into)
    gc.collect()
    assert ones() is not None, "the memory that the recording reads is free for others"
    into.zero_()
    others = [torch.full((1 << 20,), 7.0, device=device) for _ in range(8)]
    recording()
    assert (into == 1).all()
    assert len(others) == 8


def test_an_eager_recording() -> None:
    check(EagerRecorder(), torch.device("cpu"))


@pytest.mark.gpu
def test_a_graph() -> None:
    device = torch.device("cuda")
    check(GraphRecorder(device), device)
