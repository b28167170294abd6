"""The sum over ranks on one GPU: ranks are streams of one process, whose kernels run beside each other."""

import pytest
import torch

from kimi_kernels.rank_sum.kernel import RankSum, new_inbox

pytestmark = pytest.mark.gpu
MOST = 500 * 7168
SIZES = [(1, 7168), (2, 7168), (64, 7168), (3, 100), (1, 1), (500, 7168), (256, 7168), (4, 7168)]
MOST_PROGRAMS = 8
"""Programs of all ranks must find room at once, with those that start early: here on one GPU."""


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_one_behind_another(dtype: torch.dtype, size: int) -> None:
    """No rank waits for another between its calls, so they drift as far apart as the buffers allow."""
    device = torch.device("cuda")
    inboxes = [new_inbox(size, MOST, device) for _ in range(size)]
    addresses = [inbox.data_ptr() for inbox in inboxes]
    ranks = [RankSum(rank, addresses, MOST, device, MOST_PROGRAMS) for rank in range(size)]
    streams = [torch.cuda.Stream() for _ in range(size)]
    terms = [[torch.randn(shape, device=device).to(dtype) for shape in 3 * SIZES] for _ in range(size)]
    torch.cuda.synchronize()
    results = []
    for rank, stream, given in zip(ranks, streams, terms, strict=True):
        with torch.cuda.stream(stream):
            results.append([rank(x) for x in given])
    torch.cuda.synchronize()
    for place in range(len(3 * SIZES)):
        expected = torch.stack([given[place].float() for given in terms]).sum(dim=0)
        torch.testing.assert_close(results[0][place].float(), expected, rtol=2**-7, atol=1e-4)
        assert all(torch.equal(result[place], results[0][place]) for result in results)
