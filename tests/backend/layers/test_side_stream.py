"""Work beside the caller's: the result is there when joined, eagerly and in a captured graph."""

import pytest
import torch

from kimi_backend.layers.side_stream import SideStream, side_stream

CPU = torch.device("cpu")


def test_without_a_second_stream_work_runs_when_it_is_joined() -> None:
    done = []

    def work() -> torch.Tensor:
        done.append(True)
        return torch.ones(2)

    join = SideStream(CPU).start(work)
    assert not done
    assert torch.equal(join(), torch.ones(2))


def test_a_device_has_one() -> None:
    assert side_stream(CPU) is side_stream(torch.device("cpu"))


@pytest.mark.gpu
def test_work_beside_the_callers_is_captured_with_it() -> None:
    """A long product beside a short one: a missing fork or join reads what is not there yet."""
    device = torch.device("cuda")
    side = SideStream(device)
    x = torch.randn(2048, 2048, device=device)
    out = torch.zeros_like(x)

    def step() -> None:
        scaled = x * 2  # must be seen by the other stream
        join = side.start(lambda: torch.linalg.matrix_power(scaled / 200, 8))
        short = scaled + 1
        torch.add(short, join(), out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(3):
        x.copy_(torch.randn(2048, 2048, generator=torch.Generator().manual_seed(seed)))
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        expected = x * 2 + 1 + torch.linalg.matrix_power(x / 100, 8)
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
