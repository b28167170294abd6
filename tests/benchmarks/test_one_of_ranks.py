"""A rank alone: the kernels of a group over receive buffers that are all in its own memory, in the interpreter."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kimi_kernels.collectives.kernel_norm import BLOCK
from kimi_kernels.collectives.receive_buffers import NUM_SECTIONS
from slice_suite.one_of_ranks import PausedAllReduceNorm, looped_back, one_of_ranks
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED


@pytest.mark.parametrize("num_rows", [1, 3, 16])
def test_a_rank_alone_finds_in_its_memory_what_the_others_would_send(num_rows: int) -> None:
    """One row is summed in one shot, 16 in two, three are uneven; more than one call empties the receive
    buffers."""
    group = looped_back(8, torch.device("cpu"), lambda: None, most_programs=1)
    for call in range(4):
        x = torch.randn(num_rows, 7168, generator=torch.Generator().manual_seed(call)).half()
        expected = 8 * x
        if num_rows == 16:
            expected = x.float().view(-1, 8, BLOCK).sum(dim=1, keepdim=True).expand(-1, 8, -1).reshape(x.shape)
        torch.testing.assert_close(group.all_reduce(x), expected.half(), rtol=1e-3, atol=1e-2)
        assert torch.equal(group.all_gather_columns(x[:, :64]), torch.cat([x[:, :64]] * 8, dim=1))


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_rank_alone_sums_and_norms(num_rows: int) -> None:
    """One row is summed in one shot, four of four blocks each in two. The interpreter runs one program after
    another: what programs wait for in later ones is there before, squares that mean nothing among it."""
    pauses: list[int] = []
    group = looped_back(8, torch.device("cpu"), lambda: pauses.append(1))
    assert group.all_reduce_norm is not None
    x, residual = torch.randn(2, num_rows, 128, generator=torch.Generator().manual_seed(1)).half()
    all_reduce_norm = group.all_reduce_norm
    assert isinstance(all_reduce_norm, PausedAllReduceNorm)
    for one in (all_reduce_norm.one_shot, all_reduce_norm.two_shot):
        one._squares[0] = 0
    if num_rows == 4:
        x[:] = x[0]
        terms = group.memory[-1].view(NUM_SECTIONS, 2, 8, -1)[0, 0]
        terms[:, :32] = terms[:, BLOCK : BLOCK + 32] = x[0].view(torch.int16).view(4, 32).repeat(2, 1)
    _, total = group.all_reduce_norm(x, residual, torch.ones(128).half(), 1e-5)
    summed = 8 * x if num_rows == 1 else 2 * x.view(4, 4, 32).float().sum(dim=1).repeat(1, 4).half()
    torch.testing.assert_close(total, residual + summed, rtol=1e-3, atol=1e-2)
    assert pauses == [1]
    assert not group.all_reduce_norm.takes(torch.zeros(3, 128).half()), "of 12 blocks not every rank would sum as many"


def test_a_rank_alone_is_rank_0_of_equals() -> None:
    pauses: list[int] = []
    group = replace(one_of_ranks(4, torch.device("cpu"), 0.0), pause=lambda: pauses.append(1))
    x = torch.tensor([[1.5, -2.0]])
    assert (group.rank, group.size) == (0, 4)
    assert torch.equal(group.all_reduce(x), 4 * x)
    assert torch.equal(group.all_gather_columns(x), torch.cat([x] * 4, dim=1))
    values, ids = group.all_argmax(torch.tensor([0.5]), torch.tensor([7]))
    assert (values.item(), ids.item()) == (0.5, 7)
    assert len(pauses) == 3
    assert group.all_reduce(torch.tensor([3])).item() == 3, "what rank 0 tells the others in a sum stays what it is"
