"""Collectives over ranks on one GPU: ranks are streams of one process, whose kernels run beside each other."""

from collections.abc import Iterator

import pytest
import torch

from kimi_kernels.rank_exchange.kernel import RankGather, RankSum, ReceiveBuffers, new_receive_buffer
from kimi_kernels.rank_exchange.kernel_parts import RankSumInParts, new_parts_receive_buffer

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


@pytest.mark.parametrize("size", [2, 4, 8])
def test_calls_one_behind_another(size: int) -> None:
    """No rank waits for another between its calls."""
    device = torch.device("cuda")
    buffers = [
        [new_receive_buffer(dtype, size, MOST, device) for _ in range(size)] for dtype in (torch.int16, torch.int32)
    ]
    addresses = [[buffer.data_ptr() for buffer in kind] for kind in buffers]
    sums = [
        RankSum(ReceiveBuffers(rank, addresses[0], torch.int16, MOST, device), MOST_PROGRAMS) for rank in range(size)
    ]
    gathers = [
        RankGather(ReceiveBuffers(rank, addresses[1], torch.int32, MOST, device), MOST_PROGRAMS) for rank in range(size)
    ]
    part_buffers = [new_parts_receive_buffer(size, MOST, device) for _ in range(size)]
    part_addresses = [buffer.data_ptr() for buffer in part_buffers]
    parts = [RankSumInParts(rank, part_addresses, MOST, device, MOST_PROGRAMS) for rank in range(size)]
    streams = [torch.cuda.Stream() for _ in range(size)]
    given = [[torch.randn(shape, device=device).bfloat16() for shape in 3 * SIZES] for _ in range(size)]
    torch.cuda.synchronize()
    # A kernel that is loaded for the first time waits for those that run, so every variant is loaded before any waits.
    for place in range(len(SIZES)):
        for calls in (sums, gathers, parts):
            for rank, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    calls[rank](given[rank][place])
        torch.cuda.synchronize()
    results: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(size)]
    for rank, x in in_order(given):
        with torch.cuda.stream(streams[rank]):
            results[rank].append((sums[rank](x), gathers[rank](x), parts[rank](x)))
    torch.cuda.synchronize()
    for place in range(len(3 * SIZES)):
        terms = [rank[place] for rank in given]
        expected = torch.stack(terms).float().sum(dim=0)
        for summed, gathered, in_parts in (rank[place] for rank in results):
            torch.testing.assert_close(summed.float(), expected, rtol=2**-7, atol=1e-4)
            assert torch.equal(summed, results[0][place][0])
            torch.testing.assert_close(in_parts.float(), expected, rtol=2**-7, atol=1e-4)
            assert torch.equal(in_parts, results[0][place][2])
            assert torch.equal(gathered, torch.cat(terms, dim=1))
