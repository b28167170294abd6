"""The sum in parts in Triton-language's interpreter, rank by rank: what the others send is delivered before."""

import pytest
import torch

from kimi_kernels.rank_exchange.kernel import EMPTY_HALF
from kimi_kernels.rank_exchange.kernel_parts import BLOCK, RankSumInParts, new_parts_receive_buffer
from kimi_kernels.rank_exchange.kernel_receive import NUM_SECTIONS
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED
CPU = torch.device("cpu")
NUM_BLOCKS = 5
MOST = NUM_BLOCKS * BLOCK


class Ranks:
    """Receive buffers of all ranks in one process; a call runs every rank's kernel in turn."""

    def __init__(self, size: int, most_programs: int) -> None:
        self.size = size
        self.buffers = [new_parts_receive_buffer(size, MOST, CPU) for _ in range(size)]
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.ranks = [RankSumInParts(rank, addresses, MOST, CPU, most_programs) for rank in range(size)]
        self.num_calls = [0] * NUM_BLOCKS
        """The calls of each block: those of few elements have fewer blocks."""

    def section(self, rank: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's terms and sums, [size, part] each, of a block's present call: by source, and by owner."""
        whole = self.buffers[rank].view(NUM_SECTIONS, 2, self.size, -1)[self.num_calls[block] % NUM_SECTIONS]
        return whole[0], whole[1]

    def __call__(self, terms: list[torch.Tensor]) -> list[torch.Tensor]:
        """The result of each rank. An owner finds all terms, the others its sum, as if they ran beside each other."""
        expected = torch.stack(terms).float().sum(dim=0).to(terms[0].dtype) + 0.0
        counted = -(-terms[0].numel() // BLOCK)
        for block in range(counted):
            place = slice(block * BLOCK, min((block + 1) * BLOCK, terms[0].numel()))
            owned = slice(block // self.size * BLOCK, block // self.size * BLOCK + place.stop - place.start)
            for rank in range(self.size):
                to_owner, sums = self.section(rank, block)
                if rank == block % self.size:
                    for source, term in enumerate(terms):
                        to_owner[source, owned] = (term.flatten() + 0.0)[place].view(torch.int16)
                else:
                    sums[block % self.size, owned] = expected.flatten()[place].view(torch.int16)
        results = [rank(term) for rank, term in zip(self.ranks, terms, strict=True)]
        for block in range(counted):
            self.num_calls[block] += 1
        return results


@pytest.mark.parametrize(("size", "most_programs"), [(2, 9), (4, 1), (8, 2)])
def test_every_rank_has_the_sum_call_after_call(size: int, most_programs: int) -> None:
    ranks = Ranks(size, most_programs)
    generator = torch.Generator().manual_seed(size)
    for num_rows in (9, 1, 10, 10, 5, 9):
        terms = [torch.randn(num_rows, 1000, generator=generator).half() for _ in range(size)]
        results = ranks(terms)
        expected = torch.stack(terms).float().sum(dim=0)
        for result in results:
            assert torch.equal(result, results[0])
            torch.testing.assert_close(result.float(), expected, rtol=1e-3, atol=1e-3)


def test_receive_buffers_are_emptied_a_call_later() -> None:
    ranks = Ranks(2, 9)
    ones = torch.ones(MOST, dtype=torch.float16)
    for call in range(4):
        ranks([ones, ones])
        for buffer in ranks.buffers:
            used = [bool((section != EMPTY_HALF.value).any()) for section in buffer.view(NUM_SECTIONS, -1)]
            assert used == [section == call % NUM_SECTIONS for section in range(NUM_SECTIONS)], f"call {call}"


def test_a_sum_of_negative_zeros_is_zero() -> None:
    ranks = Ranks(2, 9)
    for result in ranks([torch.full((7,), -0.0, dtype=torch.float16)] * 2):
        assert result.view(torch.int16).tolist() == [0] * 7


def test_what_is_taken() -> None:
    rank = Ranks(2, 9).ranks[0]
    assert rank.takes(torch.zeros(MOST, dtype=torch.bfloat16))
    assert not rank.takes(torch.zeros(MOST + 1, dtype=torch.bfloat16))
    assert not rank.takes(torch.zeros(4))
    with pytest.raises(ValueError, match="receive buffers: got 3 of them, expected 2, 4 or 8"):
        RankSumInParts(0, [0, 0, 0], MOST, CPU)
