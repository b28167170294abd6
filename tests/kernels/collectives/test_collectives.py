"""Collectives over ranks against their definitions, in Triton-language's interpreter, which runs one rank after
another: what the other ranks would send, and the other programs of a row would tell, is there before."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from kimi_kernels.collectives import naive
from kimi_kernels.collectives.kernel import AllGather, AllReduce
from kimi_kernels.collectives.kernel_norm import ROW_BLOCKS, FusedAllReduceNorm, columns_of_a_program
from kimi_kernels.collectives.receive_buffers import (
    BLOCK_BYTES,
    EMPTY_HALF,
    EMPTY_WORD,
    NUM_SECTIONS,
    ReceiveBuffers,
    new_receive_buffer,
)
from kimi_kernels.moe_experts.op import ExpertOutputs
from kimi_kernels.moe_experts.plain import sum_terms
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED
CPU = torch.device("cpu")
EPS = 1e-5
SHOTS = pytest.mark.parametrize("two_shot", [False, True], ids=["one shot", "two shots"])
Tensors = Sequence[torch.Tensor]


class Ranks:
    """Receive buffers of all ranks in one process; a call runs every rank's kernel in turn."""

    def __init__(
        self,
        make: Callable[[ReceiveBuffers], Any],
        size: int,
        num_blocks: int,
        dtype: torch.dtype = torch.int16,
        two_shot: bool = False,
    ) -> None:
        self.size, self.dtype, self.two_shot = size, dtype, two_shot
        self.block = BLOCK_BYTES // dtype.itemsize
        self.buffers = [new_receive_buffer(dtype, size, num_blocks, CPU, two_shot=two_shot) for _ in range(size)]
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.ranks = [
            make(ReceiveBuffers(rank, addresses, dtype, num_blocks, CPU, two_shot=two_shot)) for rank in range(size)
        ]
        self.num_calls = [0] * num_blocks
        """The calls of each block: those of few elements have fewer blocks."""

    def slots(self, rank: int, call: int) -> torch.Tensor:
        """A section of a rank's receive buffer, [terms, and of two shots sums; rank that sends; elements]."""
        sections = self.buffers[rank].view(NUM_SECTIONS, 2 if self.two_shot else 1, self.size, -1)
        return sections[call % NUM_SECTIONS]

    def deliver(self, rank: int, block: int, terms: Tensors, summed: torch.Tensor | None = None) -> None:
        """Send what the other ranks' kernels would of a block; no element has bits to replace but negative zeros."""
        slots, place = self.slots(rank, self.num_calls[block]), block // self.size if self.two_shot else block
        if self.two_shot and block % self.size != rank:
            assert summed is not None
            slots[1, block % self.size, place * self.block :][: len(summed)] = (summed + 0.0).view(self.dtype)
            return
        for source, term in enumerate(terms):
            words = (term + 0.0).view(self.dtype)
            slots[0, source, place * self.block :][: len(words)] = words

    def __call__(self, given: Tensors) -> list[torch.Tensor]:
        """The result of each rank."""
        words = self.block * self.dtype.itemsize // given[0].itemsize
        chunks = [x.flatten().split(words) for x in given]
        summed = naive.all_reduce(given).flatten().split(words)
        for block in range(len(summed)):
            for rank in range(self.size):
                self.deliver(rank, block, [x[block] for x in chunks], summed[block])
        results = [call(x) for call, x in zip(self.ranks, given, strict=True)]
        for block in range(len(summed)):
            self.num_calls[block] += 1
        return results


class NormRanks(Ranks):
    """The same of sums with their norm."""

    def __init__(self, size: int, two_shot: bool = False) -> None:
        super().__init__(FusedAllReduceNorm, size, 8, two_shot=two_shot)

    def norm(
        self, terms: Tensors, residual: torch.Tensor, weight: torch.Tensor, second: bool = False
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The results of each rank; second: the terms are given in two halves each."""
        summed = naive.all_reduce(terms)
        _, stream = naive.all_reduce_norm(terms, residual, weight, EPS)
        rows, width = residual.shape
        for program in range(rows * ROW_BLOCKS):
            row, size = program // ROW_BLOCKS, columns_of_a_program(width)
            start = min(program % ROW_BLOCKS * size, width)
            columns = slice(start, min(start + size, width))
            square = stream[row, columns].float().square().sum()
            for rank in range(self.size):
                self.deliver(rank, program, [term[row, columns] for term in terms], summed[row, columns])
                self.ranks[rank]._squares[self.num_calls[program] % NUM_SECTIONS, program] = square.view(torch.int32)
        halves = [(term / 2, term / 2) if second else (term, None) for term in terms]
        results = [
            rank(first, residual, weight, EPS, half) for rank, (first, half) in zip(self.ranks, halves, strict=True)
        ]
        for program in range(rows * ROW_BLOCKS):
            self.num_calls[program] += 1
        return results


def random_terms(size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for _ in range(size)]


@pytest.mark.parametrize(
    ("size", "most_programs", "two_shot"),
    [(2, 5, False), (4, 1, False), (8, 5, False), (2, 9, True), (4, 1, True), (8, 2, True)],
)
def test_every_rank_has_the_sum_call_after_call(size: int, most_programs: int, two_shot: bool) -> None:
    ranks = Ranks(partial(AllReduce, most_programs=most_programs), size, 5, two_shot=two_shot)
    for num_rows in (9, 1, 10, 10, 5) if two_shot else (3, 1, 4, 4, 2):
        terms = random_terms(size, (num_rows, 1000))
        for result in ranks(terms):
            torch.testing.assert_close(result, naive.all_reduce(terms), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("size", "most_programs", "dtype"), [(2, 5, torch.float32), (4, 1, torch.bfloat16), (8, 5, torch.bfloat16)]
)
def test_every_rank_has_all_columns_call_after_call(size: int, most_programs: int, dtype: torch.dtype) -> None:
    ranks = Ranks(partial(AllGather, most_programs=most_programs), size, 4, torch.int32)
    for shape in ((3, 1000), (1, 36), (4, 1000), (7, 2), (4, 1024)):
        columns = random_terms(size, shape, dtype)
        for result in ranks(columns):
            assert torch.equal(result, naive.all_gather(columns))


@SHOTS
@pytest.mark.parametrize("size", [2, 8])
def test_every_rank_has_the_norm_of_the_stream_and_the_sum_call_after_call(size: int, two_shot: bool) -> None:
    ranks = NormRanks(size, two_shot)
    for rows, width in ((1, 1000), (2, 8192), (2, 1000), (1, 16)):
        terms = random_terms(size, (rows, width))
        residual, weight = torch.randn(rows, 2 * width).half()[:, width:], torch.randn(width).half()
        expected, stream = naive.all_reduce_norm(terms, residual, weight, EPS)
        results = ranks.norm(terms, residual, weight, second=width == 1000)
        for normed, total in results:
            assert torch.equal(normed, results[0][0]) and torch.equal(total, results[0][1])
            torch.testing.assert_close(total, stream, rtol=1e-3, atol=2e-3)
            torch.testing.assert_close(normed.double(), expected, rtol=2e-3, atol=2e-3)


def test_a_sum_sends_to_every_rank_and_zero_in_place_of_negative_zero() -> None:
    ranks = Ranks(AllReduce, 2, 2)
    x = torch.tensor([-0.0, 1.5, float("nan"), float("-inf")], dtype=torch.float16)
    ranks.deliver(0, 0, [x, torch.zeros(4, dtype=torch.float16)])
    result = ranks.ranks[0](x)
    sent = ranks.slots(1, 0)[0, 0]
    assert sent[0] == 0
    for found in (sent[:4].view(torch.float16), result):
        torch.testing.assert_close(found, x, rtol=0, atol=0, equal_nan=True)
    assert (sent[4:] == EMPTY_HALF).all(), "nothing is sent past the elements"


@SHOTS
def test_a_sum_of_negative_zeros_is_zero(two_shot: bool) -> None:
    ranks = Ranks(AllReduce, 2, 5, two_shot=two_shot)
    for result in ranks([torch.full((7,), -0.0, dtype=torch.float16)] * 2):
        assert result.view(torch.int16).tolist() == [0] * 7


def test_a_gather_sends_another_nan_in_place_of_the_empty_one() -> None:
    ranks = Ranks(AllGather, 2, 4, torch.int32)
    x = torch.tensor([[-0.0, 1.5, float("nan"), float("-inf"), 0.0]])
    x.view(torch.int32)[0, 4] = EMPTY_WORD
    ranks.deliver(0, 0, [x[0, :0], torch.ones(5)])
    result = ranks.ranks[0](x)
    assert result[0, 5:].tolist() == [1] * 5
    torch.testing.assert_close(result[:, :5], x, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(result.view(torch.int32)[0, :4], x.view(torch.int32)[0, :4])
    sent = ranks.slots(1, 0)[0, 0]
    assert (sent[:5] != EMPTY_WORD).all()
    assert (sent[5:] == EMPTY_WORD).all()


def test_two_addends_are_rounded_before_they_are_sent() -> None:
    """1 + 2^-11 is no half: half of a rank's term is lost, as it is where an addition of its own rounds the sum."""
    ranks = NormRanks(2)
    one, little = torch.ones(1, 16).half(), torch.full((1, 16), 2.0**-11).half()
    ranks.deliver(0, 0, [one[0], one[0]])
    ranks.ranks[0]._squares[0] = 0
    _, total = ranks.ranks[0](one, torch.zeros(1, 16).half(), torch.ones(16).half(), EPS, little)
    assert (total == 2).all()


def test_the_experts_outputs_are_summed_before_they_are_sent() -> None:
    outputs = ExpertOutputs(
        outputs=torch.randn(6, 1000).half(),
        topk_ids=torch.tensor([[0, 5, 2], [-1, -1, -1]], dtype=torch.int32),
        topk_weights=torch.rand(2, 3),
        first_expert=0,
        num_experts=4,
    )
    outputs.outputs[[1, 3, 4, 5]] = torch.nan  # of an expert held elsewhere, and of padding
    second, residual, weight = torch.randn(2, 1000).half(), torch.randn(2, 1000).half(), torch.rand(1000).half()
    totals, sent = [], []
    for term in (outputs, sum_terms(outputs)):
        ranks = NormRanks(2)
        for program in range(8):
            ranks.deliver(0, program, [torch.ones(500).half()] * 2)
            ranks.ranks[0]._squares[0, program] = 0
        totals.append(ranks.ranks[0](term, residual, weight, EPS, second)[1])
        sent.append(ranks.buffers[1])
    assert torch.equal(*totals) and torch.equal(*sent)
    assert not totals[0].isnan().any()


@SHOTS
def test_a_call_empties_what_the_call_before_filled(two_shot: bool) -> None:
    summed, normed = Ranks(AllReduce, 2, 5, two_shot=two_shot), NormRanks(2, two_shot)
    ones, weight = torch.ones(2, 3000).half(), torch.ones(3000).half()
    for call in range(4):
        summed([ones, ones])
        normed.norm([ones, ones], ones, weight)
        wanted = [section == call % NUM_SECTIONS for section in range(NUM_SECTIONS)]
        for buffer in (*summed.buffers, *normed.buffers):
            used = [bool((section != EMPTY_HALF).any()) for section in buffer.view(NUM_SECTIONS, -1)]
            assert used == wanted, f"call {call}"
        for rank in normed.ranks:
            assert [bool((squares != EMPTY_WORD).any()) for squares in rank._squares] == wanted, f"call {call}"


@SHOTS
def test_what_is_summed(two_shot: bool) -> None:
    summed = Ranks(AllReduce, 2, 3, two_shot=two_shot).ranks[0]
    assert summed.takes(torch.zeros(3 * 2048, dtype=torch.float16))
    assert summed.takes(torch.zeros(1, 7, dtype=torch.bfloat16))
    assert not summed.takes(torch.zeros(3 * 2048 + 1, dtype=torch.float16))
    assert not summed.takes(torch.zeros(0, dtype=torch.float16))
    assert not summed.takes(torch.zeros(4))


def test_what_is_gathered() -> None:
    gathered = Ranks(AllGather, 2, 4, torch.int32).ranks[0]
    assert gathered.takes(torch.zeros(2, 2048))
    assert gathered.takes(torch.zeros(3, 6, dtype=torch.bfloat16))
    assert not gathered.takes(torch.zeros(3, 7, dtype=torch.bfloat16)), "half a word"
    assert not gathered.takes(torch.zeros(2, 2049))
    assert not gathered.takes(torch.zeros(0, 4))
    assert not gathered.takes(torch.zeros(4))
    assert not gathered.takes(torch.zeros(2, 4, dtype=torch.int32)), "-1 would be another number"


def test_what_is_normed() -> None:
    rank = NormRanks(2).ranks[0]
    assert rank.takes(torch.zeros(2, 7).half()), "four programs a row"
    assert rank.takes(torch.zeros(2, 8192).bfloat16())
    assert not rank.takes(torch.zeros(2, 8193).bfloat16())
    assert not rank.takes(torch.zeros(3, 7168).bfloat16())
    assert not rank.takes(torch.zeros(0, 7168).bfloat16())
    assert not rank.takes(torch.zeros(2, 7168))
    one = torch.ones(1, 8).half()
    with pytest.raises(ValueError, match="second: got shape"):
        rank(one, one, torch.ones(8).half(), EPS, torch.ones(2, 8).half())
    with pytest.raises(ValueError, match="residual: got shape"):
        rank(one, torch.ones(2, 8).half(), torch.ones(8).half(), EPS)


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="receive buffers: got 3 of them, expected 2, 4 or 8"):
        ReceiveBuffers(0, [0, 0, 0], torch.int16, 1, CPU)
