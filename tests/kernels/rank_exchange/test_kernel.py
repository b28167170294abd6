"""Collectives over ranks in Triton-language's interpreter, rank by rank: the others' elements are delivered before."""

from collections.abc import Callable

import pytest
import torch

from kimi_kernels.rank_exchange.kernel import (
    BLOCK_BYTES,
    EMPTY_HALF,
    EMPTY_WORD,
    RankGather,
    RankSum,
    ReceiveBuffers,
    new_receive_buffer,
)
from kimi_kernels.rank_exchange.kernel_receive import NUM_SECTIONS
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED
CPU = torch.device("cpu")
MOST = 4096
"""Two blocks of int16, four of int32."""

Call = Callable[[torch.Tensor], torch.Tensor]


class Ranks:
    """Receive buffers of all ranks in one process; a call runs every rank's kernel in turn."""

    def __init__(self, kind: type[RankSum] | type[RankGather], size: int, most_programs: int = 5) -> None:
        self.dtype = torch.int16 if kind is RankSum else torch.int32
        self.buffers = [new_receive_buffer(self.dtype, size, MOST, CPU) for _ in range(size)]
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.block = BLOCK_BYTES // self.dtype.itemsize
        self.calls: list[Call] = [
            kind(ReceiveBuffers(rank, addresses, self.dtype, MOST, CPU), most_programs) for rank in range(size)
        ]
        self.num_calls = [0] * (MOST // self.block)
        """The calls of each block: those of few elements have fewer blocks."""

    def slot(self, rank: int, source: int, call: int) -> torch.Tensor:
        """[MOST] of a rank's receive buffer, where another rank's elements of a call come."""
        return self.buffers[rank].view(NUM_SECTIONS, len(self.buffers), MOST)[call % NUM_SECTIONS, source]

    def deliver(self, rank: int, source: int, given: torch.Tensor) -> None:
        """Send what a rank's kernel would, if one interpreter could run two at once; `given` has no bits to replace."""
        for block, part in enumerate(given.flatten().view(self.dtype).split(self.block)):
            self.slot(rank, source, self.num_calls[block])[block * self.block :][: len(part)] = part

    def __call__(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """The result of each rank."""
        for rank in range(len(given)):
            for source, x in enumerate(given):
                self.deliver(rank, source, x)
        results = [call(x) for call, x in zip(self.calls, given, strict=True)]
        for block in range(-(-given[0].nbytes // BLOCK_BYTES)):
            self.num_calls[block] += 1
        return results


@pytest.mark.parametrize(("size", "most_programs"), [(2, 5), (4, 1), (8, 5)])
def test_every_rank_has_the_sum_call_after_call(size: int, most_programs: int) -> None:
    ranks = Ranks(RankSum, size, most_programs)
    generator = torch.Generator().manual_seed(size)
    for num_rows in (3, 1, 4, 4, 2):
        terms = [torch.randn(num_rows, 1000, generator=generator).half() for _ in range(size)]
        results = ranks(terms)
        expected = torch.stack(terms).float().sum(dim=0)
        for result in results:
            assert result.dtype == torch.float16
            assert torch.equal(result, results[0])
            torch.testing.assert_close(result.float(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("size", "most_programs", "dtype"), [(2, 5, torch.float32), (4, 1, torch.bfloat16), (8, 5, torch.bfloat16)]
)
def test_every_rank_has_all_columns_call_after_call(size: int, most_programs: int, dtype: torch.dtype) -> None:
    ranks = Ranks(RankGather, size, most_programs)
    generator = torch.Generator().manual_seed(size)
    for num_rows, columns in ((3, 1000), (1, 36), (4, 1000), (7, 2), (4, 1024)):
        parts = [torch.randn(num_rows, columns, generator=generator).to(dtype) for _ in range(size)]
        for result in ranks(parts):
            assert torch.equal(result, torch.cat(parts, dim=1))


def test_a_sum_sends_to_every_rank_and_zero_in_place_of_negative_zero() -> None:
    ranks = Ranks(RankSum, 2)
    x = torch.tensor([-0.0, 1.5, float("nan"), float("-inf")], dtype=torch.float16)
    ranks.deliver(0, 1, torch.zeros(4, dtype=torch.float16))
    result = ranks.calls[0](x)
    sent = ranks.slot(1, 0, 0)[:4].view(torch.float16)
    assert sent.view(torch.int16)[0] == 0
    for found in (sent, result):
        torch.testing.assert_close(found, x, rtol=0, atol=0, equal_nan=True)
    assert (ranks.slot(1, 0, 0)[4:] == EMPTY_HALF.value).all(), "nothing is sent past the elements"


def test_a_gather_sends_another_nan_in_place_of_the_empty_one() -> None:
    ranks = Ranks(RankGather, 2)
    x = torch.tensor([[-0.0, 1.5, float("nan"), float("-inf"), 0.0]])
    x.view(torch.int32)[0, 4] = EMPTY_WORD.value
    ranks.deliver(0, 1, torch.ones(5))
    result = ranks.calls[0](x)
    assert result[0, 5:].tolist() == [1] * 5
    torch.testing.assert_close(result[:, :5], x, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(result.view(torch.int32)[0, :4], x.view(torch.int32)[0, :4])
    assert (ranks.slot(1, 0, 0)[:5] != EMPTY_WORD.value).all()
    assert (ranks.slot(1, 0, 0)[5:] == EMPTY_WORD.value).all()


def test_a_call_empties_what_the_call_before_filled() -> None:
    ranks = Ranks(RankSum, 2)
    ones = torch.ones(3000, dtype=torch.float16)
    for call in range(4):
        ranks([ones, ones])
        for rank in range(2):
            left = [bool((ranks.slot(rank, 1 - rank, past)[:3000] != EMPTY_HALF.value).any()) for past in range(3)]
            assert left == [section == call % NUM_SECTIONS for section in range(3)], f"call {call}, rank {rank}"


def test_what_is_summed() -> None:
    summed = Ranks(RankSum, 2).calls[0]
    assert isinstance(summed, RankSum)
    assert summed.takes(torch.zeros(MOST, dtype=torch.float16))
    assert summed.takes(torch.zeros(1, 7, dtype=torch.bfloat16))
    assert not summed.takes(torch.zeros(MOST + 1, dtype=torch.float16))
    assert not summed.takes(torch.zeros(0, dtype=torch.float16))
    assert not summed.takes(torch.zeros(4))


def test_what_is_gathered() -> None:
    gathered = Ranks(RankGather, 2).calls[0]
    assert isinstance(gathered, RankGather)
    assert gathered.takes(torch.zeros(2, MOST // 2))
    assert gathered.takes(torch.zeros(3, 6, dtype=torch.bfloat16))
    assert not gathered.takes(torch.zeros(3, 7, dtype=torch.bfloat16)), "half a word"
    assert not gathered.takes(torch.zeros(2, MOST // 2 + 1))
    assert not gathered.takes(torch.zeros(0, 4))
    assert not gathered.takes(torch.zeros(4))
    assert not gathered.takes(torch.zeros(2, 4, dtype=torch.int32)), "-1 would be another number"


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="receive buffers: got 3 of them, expected 2, 4 or 8"):
        ReceiveBuffers(0, [0, 0, 0], torch.int16, MOST, CPU)
