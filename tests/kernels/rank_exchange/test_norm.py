"""The sum over ranks with its norm in Triton-language's interpreter, rank by rank: what the others would send, and what
the other programs of a row would tell, is there before."""

import pytest
import torch

from kimi_kernels.moe_experts.op import ExpertOutputs
from kimi_kernels.moe_experts.plain import sum_terms
from kimi_kernels.rank_exchange.kernel import EMPTY_HALF, EMPTY_WORD
from kimi_kernels.rank_exchange.kernel_norm import (
    BLOCK,
    ROW_BLOCKS,
    RankSumNorm,
    columns_of_a_program,
    new_norm_receive_buffer,
)
from kimi_kernels.rank_exchange.kernel_receive import NUM_SECTIONS
from kimi_kernels.rms_norm import plain
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED
CPU = torch.device("cpu")
MOST_BLOCKS = 8
EPS = 1e-5


class Ranks:
    """Receive buffers of all ranks in one process; a call runs every rank's kernel in turn."""

    def __init__(self, size: int, in_parts: bool) -> None:
        self.size, self.in_parts = size, in_parts
        self.buffers = [new_norm_receive_buffer(size, MOST_BLOCKS, CPU, in_parts=in_parts) for _ in range(size)]
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.ranks = [RankSumNorm(rank, addresses, MOST_BLOCKS, CPU, in_parts=in_parts) for rank in range(size)]
        self.num_calls = [0] * MOST_BLOCKS
        """The calls of each program: those of few rows have fewer programs."""

    def __call__(
        self, terms: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, second: bool = False
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The results of each rank; second: the terms are given in two halves each."""
        summed = torch.stack(terms).float().sum(dim=0).to(terms[0].dtype)
        stream = residual.float() + summed.float()
        rows, width = residual.shape
        for program in range(rows * ROW_BLOCKS):
            row, size = program // ROW_BLOCKS, columns_of_a_program(width)
            start = min(program % ROW_BLOCKS * size, width)
            columns = slice(start, min(start + size, width))
            square = stream[row, columns].to(residual.dtype).float().square().sum()
            for rank in range(self.size):
                self._deliver(rank, program, [term[row, columns] for term in terms], summed[row, columns])
                self.ranks[rank]._squares[self.num_calls[program] % NUM_SECTIONS, program] = square.view(torch.int32)
        halves = [(term / 2, term / 2) if second else (term, None) for term in terms]
        results = [
            rank(first, residual, weight, EPS, half) for rank, (first, half) in zip(self.ranks, halves, strict=True)
        ]
        for program in range(rows * ROW_BLOCKS):
            self.num_calls[program] += 1
        return results

    def _deliver(self, rank: int, program: int, terms: list[torch.Tensor], summed: torch.Tensor) -> None:
        call = self.num_calls[program] % NUM_SECTIONS
        section = self.buffers[rank].view(NUM_SECTIONS, -1, self.size, self.buffers[0].numel() // self._num_slots)[call]
        place = program // self.size if self.in_parts else program
        if not self.in_parts or program % self.size == rank:
            for source, term in enumerate(terms):
                section[0, source, place * BLOCK :][: len(term)] = (term + 0.0).view(torch.int16)
        else:
            section[1, program % self.size, place * BLOCK :][: len(summed)] = (summed + 0.0).view(torch.int16)

    @property
    def _num_slots(self) -> int:
        return NUM_SECTIONS * self.size * (2 if self.in_parts else 1)


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("size", [2, 8])
def test_every_rank_has_the_norm_of_the_stream_and_the_sum_call_after_call(size: int, in_parts: bool) -> None:
    ranks = Ranks(size, in_parts)
    generator = torch.Generator().manual_seed(size)
    for rows, width in ((1, 1000), (2, 8192), (2, 1000), (1, 16)):
        terms = [torch.randn(rows, width, generator=generator).half() for _ in range(size)]
        residual = torch.randn(rows, 2 * width, generator=generator).half()[:, width:]
        weight = torch.randn(width, generator=generator).half()
        summed = torch.stack(terms).float().sum(dim=0).half()
        expected, stream = plain.add_rms_norm(summed, residual, weight, EPS)
        results = ranks(terms, residual, weight, second=width == 1000)
        for normed, total in results:
            assert torch.equal(normed, results[0][0]) and torch.equal(total, results[0][1])
            torch.testing.assert_close(total, stream, rtol=1e-3, atol=2e-3)
            torch.testing.assert_close(normed, expected, rtol=2e-3, atol=2e-3)


def test_two_addends_are_rounded_before_they_are_sent() -> None:
    """1 + 2^-11 is no half: half of a rank's term is lost, as it is where an addition of its own rounds the sum."""
    ranks = Ranks(2, in_parts=False)
    one, little = torch.ones(1, 16).half(), torch.full((1, 16), 2.0**-11).half()
    ranks._deliver(0, 0, [one[0], one[0]], one[0])
    ranks.ranks[0]._squares[0] = 0
    _, total = ranks.ranks[0](one, torch.zeros(1, 16).half(), torch.ones(16).half(), EPS, little)
    assert (total == 2).all()


def test_products_of_choices_are_summed_before_they_are_sent() -> None:
    torch.manual_seed(0)
    choices = ExpertOutputs(
        outputs=torch.randn(6, 1000).half(),
        topk_ids=torch.tensor([[0, 5, 2], [-1, -1, -1]], dtype=torch.int32),
        topk_weights=torch.rand(2, 3),
        first_expert=0,
        num_experts=4,
    )
    choices.outputs[[1, 3, 4, 5]] = torch.nan  # of an expert held elsewhere, and of padding
    second, residual, weight = torch.randn(2, 1000).half(), torch.randn(2, 1000).half(), torch.rand(1000).half()
    results = []
    for term in (choices, sum_terms(choices)):
        ranks = Ranks(2, in_parts=False)
        for program in range(8):
            ranks._deliver(0, program, [torch.ones(500).half()] * 2, torch.ones(500).half())
            ranks.ranks[0]._squares[0, program] = 0
        results.append(ranks.ranks[0](term, residual, weight, EPS, second))
        results.append(tuple(ranks.buffers[0].clone() for _ in range(1)))
    assert torch.equal(results[0][1], results[2][1]) and torch.equal(results[1][0], results[3][0])
    assert not results[0][1].isnan().any()


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
def test_a_call_empties_what_the_call_before_filled(in_parts: bool) -> None:
    ranks = Ranks(2, in_parts)
    ones, weight = torch.ones(2, 3000).half(), torch.ones(3000).half()
    for call in range(4):
        ranks([ones, ones], ones, weight)
        for rank, buffer in zip(ranks.ranks, ranks.buffers, strict=True):
            used = [bool((section != EMPTY_HALF.value).any()) for section in buffer.view(NUM_SECTIONS, -1)]
            told = [bool((squares != EMPTY_WORD.value).any()) for squares in rank._squares]
            assert used == told == [section == call % NUM_SECTIONS for section in range(NUM_SECTIONS)], f"call {call}"


def test_what_is_taken() -> None:
    rank = Ranks(2, in_parts=False).ranks[0]
    assert rank.takes(torch.zeros(2, 7).half()), "four programs a row"
    assert rank.takes(torch.zeros(2, 8192).bfloat16())
    assert not rank.takes(torch.zeros(2, 8193).bfloat16())
    assert not rank.takes(torch.zeros(3, 7168).bfloat16())
    assert not rank.takes(torch.zeros(0, 7168).bfloat16())
    assert not rank.takes(torch.zeros(2, 7168))
    with pytest.raises(ValueError, match="receive buffers: got 3 of them, expected 2, 4 or 8"):
        RankSumNorm(0, [0, 0, 0], MOST_BLOCKS, CPU, in_parts=False)
    with pytest.raises(ValueError, match="second: got shape"):
        rank(torch.ones(1, 8).half(), torch.ones(1, 8).half(), torch.ones(8).half(), EPS, torch.ones(2, 8).half())
