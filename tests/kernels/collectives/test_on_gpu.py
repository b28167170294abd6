"""Collectives over ranks on one GPU: ranks are streams of one process, whose kernels run beside each other."""

from collections.abc import Iterator

import pytest
import torch

from kimi_kernels.collectives.kernel import AllGather, AllReduce
from kimi_kernels.collectives.receive_buffers import ReceiveBuffers, blocks_of, new_receive_buffer

pytestmark = pytest.mark.gpu
MOST = 500 * 7168
SIZES = [(1, 7168), (2, 7168), (64, 7168), (3, 100), (1, 2), (500, 7168), (256, 7168), (4, 7168)]
MOST_PROGRAMS = 8
"""Programs of all ranks must find room at once, with those that start early: here on one GPU."""


def in_order(given: list[list[torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
    """(rank, x) of all calls. Two ranks drift as far apart as the buffers allow. More share the device's queues,
    where a rank's first call must not stand behind another's second; so they go call by call."""
    if len(given) == 2:
        yield from ((rank, x) for rank, terms in enumerate(given) for x in terms)
    else:
        yield from ((rank, x) for terms in zip(*given, strict=True) for rank, x in enumerate(terms))


def ranks_of(
    kind: type[AllReduce] | type[AllGather],
    dtype: torch.dtype,
    size: int,
    memory: list[torch.Tensor],
    two_shot: bool = False,
) -> list[AllReduce | AllGather]:
    """Every rank's call over receive buffers in `memory`, which kernels know by their addresses only."""
    device, num_blocks = torch.device("cuda"), blocks_of(MOST * dtype.itemsize)
    own = [new_receive_buffer(dtype, size, num_blocks, device, two_shot=two_shot) for _ in range(size)]
    memory += own
    addresses = [buffer.data_ptr() for buffer in own]
    return [
        kind(ReceiveBuffers(rank, addresses, dtype, num_blocks, device, two_shot=two_shot), MOST_PROGRAMS)
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_calls_one_behind_another(size: int) -> None:
    """No rank waits for another between its calls."""
    device = torch.device("cuda")
    memory: list[torch.Tensor] = []
    sums = ranks_of(AllReduce, torch.int16, size, memory)
    gathers = ranks_of(AllGather, torch.int32, size, memory)
    two_shots = ranks_of(AllReduce, torch.int16, size, memory, two_shot=True)
    streams = [torch.cuda.Stream() for _ in range(size)]
    given = [[torch.randn(shape, device=device).bfloat16() for shape in 3 * SIZES] for _ in range(size)]
    torch.cuda.synchronize()
    # A kernel that is loaded for the first time waits for those that run, so every variant is loaded before any waits.
    for place in range(len(SIZES)):
        for calls in (sums, gathers, two_shots):
            for rank, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    calls[rank](given[rank][place])
        torch.cuda.synchronize()
    results: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(size)]
    for rank, x in in_order(given):
        with torch.cuda.stream(streams[rank]):
            results[rank].append((sums[rank](x), gathers[rank](x), two_shots[rank](x)))
    torch.cuda.synchronize()
    for place in range(len(3 * SIZES)):
        terms = [rank[place] for rank in given]
        expected = torch.stack(terms).float().sum(dim=0)
        for summed, gathered, two_shot in (rank[place] for rank in results):
            torch.testing.assert_close(summed.float(), expected, rtol=2**-7, atol=1e-4)
            assert torch.equal(summed, results[0][place][0])
            torch.testing.assert_close(two_shot.float(), expected, rtol=2**-7, atol=1e-4)
            assert torch.equal(two_shot, results[0][place][2])
            assert torch.equal(gathered, torch.cat(terms, dim=1))
