"""The sum over ranks in Triton-language's interpreter, rank by rank: the others' rows are in its inbox already."""

import pytest
import torch

from kimi_kernels.rank_sum.kernel import BLOCK, EMPTY, NUM_BUFFERS, RankSum, new_inbox
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED
CPU = torch.device("cpu")
MOST = 2 * BLOCK


class Ranks:
    """Inboxes of all ranks in one process; a call runs every rank's kernel in turn."""

    def __init__(self, size: int, most_programs: int = 5) -> None:
        self.inboxes = [new_inbox(size, MOST, CPU) for _ in range(size)]
        addresses = [inbox.data_ptr() for inbox in self.inboxes]
        self.sums = [RankSum(rank, addresses, MOST, CPU, most_programs) for rank in range(size)]
        self.num_calls = [0] * (MOST // BLOCK)
        """Of each block: calls of few rows have fewer."""

    def slot(self, rank: int, source: int, call: int) -> torch.Tensor:
        """[MOST] int16 of a rank's inbox, where another rank's rows of a call come."""
        size = len(self.inboxes)
        return self.inboxes[rank].view(NUM_BUFFERS, size, MOST)[call % NUM_BUFFERS, source]

    def __call__(self, terms: list[torch.Tensor]) -> list[torch.Tensor]:
        """What each rank returns. The interpreter runs one kernel at a time, so rows are delivered beforehand, as the
        kernels of the other ranks would: each then writes the same bits there again."""
        for rank in range(len(terms)):
            for source, term in enumerate(terms):
                for block, part in enumerate((term.flatten() + 0.0).view(torch.int16).split(BLOCK)):
                    slot = self.slot(rank, source, self.num_calls[block])
                    slot[block * BLOCK :][: len(part)] = part
        results = [summed(term) for summed, term in zip(self.sums, terms, strict=True)]
        for block in range(-(-terms[0].numel() // BLOCK)):
            self.num_calls[block] += 1
        return results


@pytest.mark.parametrize(("size", "most_programs"), [(2, 5), (4, 1), (8, 5)])
def test_every_rank_has_the_sum_call_after_call(size: int, most_programs: int) -> None:
    ranks = Ranks(size, most_programs)
    generator = torch.Generator().manual_seed(size)
    for num_rows in (3, 1, 4, 4, 2):
        terms = [torch.randn(num_rows, 1000, generator=generator).half() for _ in range(size)]
        results = ranks(terms)
        expected = torch.stack(terms).float().sum(dim=0)
        for result in results:
            assert result.dtype == torch.float16
            assert torch.equal(result, results[0])
            torch.testing.assert_close(result.float(), expected, rtol=1e-3, atol=1e-3)


def test_rows_are_sent_to_every_rank_and_zero_in_place_of_negative_zero() -> None:
    ranks = Ranks(2)
    x = torch.tensor([-0.0, 1.5, float("nan"), float("-inf")], dtype=torch.float16)
    ranks.slot(0, 1, 0)[:4] = torch.zeros(4, dtype=torch.float16).view(torch.int16)
    result = ranks.sums[0](x)
    sent = ranks.slot(1, 0, 0)[:4].view(torch.float16)
    assert sent.view(torch.int16)[0] == 0
    for found in (sent, result):
        torch.testing.assert_close(found, x, rtol=0, atol=0, equal_nan=True)
    assert (ranks.slot(1, 0, 0)[4:] == EMPTY.value).all(), "nothing is sent past the rows"


def test_a_call_empties_what_the_call_before_filled() -> None:
    ranks = Ranks(2)
    ones = torch.ones(3000, dtype=torch.float16)
    for call in range(4):
        ranks([ones, ones])
        for rank in range(2):
            left = [bool((ranks.slot(rank, 1 - rank, past)[:3000] != EMPTY.value).any()) for past in range(3)]
            assert left == [buffer == call % NUM_BUFFERS for buffer in range(3)], f"call {call}, rank {rank}"


def test_what_is_taken() -> None:
    summed = Ranks(2).sums[0]
    assert summed.takes(torch.zeros(MOST, dtype=torch.float16))
    assert summed.takes(torch.zeros(1, 7, dtype=torch.bfloat16))
    assert not summed.takes(torch.zeros(MOST + 1, dtype=torch.float16))
    assert not summed.takes(torch.zeros(0, dtype=torch.float16))
    assert not summed.takes(torch.zeros(4))


def test_ranks_that_are_no_power_of_two_are_refused() -> None:
    with pytest.raises(ValueError, match="inboxes: got 3 of them, expected a power of two"):
        RankSum(0, [0, 0, 0], MOST, CPU)
