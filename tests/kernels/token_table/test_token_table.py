"""A verify and a draft step read the token table and write it: each implementation against one row after another."""

from typing import Any

import pytest
import torch

from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import PLACEHOLDER_TOKEN_ID, STATUS_NOT_FINITE
from kimi_kernels.token_table import kernel, naive, plain, stamp_of, token_table_ops
from kimi_kernels.token_table.op import TokenTableOps
from support.interpreted import INTERPRETED

CPU = torch.device("cpu")
VOCAB = 50
BLOCK_SIZE = 4
POISON = 2**30
STAMP = 7
Tensors = dict[str, torch.Tensor]


class Case:
    """A random step of some sequences in a bucket that has room for more, over a table of which some rows are stale."""

    def __init__(self, device: torch.device, num_seqs: int, longest: int, num_draws: int, seed: int) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device
        num_live = max(num_seqs - 1, 1)
        is_live = torch.arange(num_seqs) < num_live
        query_lens = torch.where(is_live, 1 + self.ints(longest, num_seqs), 0)
        counts = torch.minimum(self.ints(longest + 1, num_seqs), query_lens)
        ends = query_lens.cumsum(0)
        num_rows = int(ends[-1]) + 3
        self.num_rows, self.num_seqs, self.num_table_rows = num_rows, num_seqs, num_seqs + 5
        sequence = torch.full((num_rows,), num_seqs - 1)
        sequence[: int(ends[-1])] = torch.repeat_interleave(torch.arange(num_seqs), query_lens)
        table_rows = torch.randperm(self.num_table_rows - 1, generator=self.generator)[:num_seqs]
        table_rows[~is_live] = self.num_table_rows - 1
        live = is_live.long()
        shared = {
            "sequence": sequence,
            "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
            "table_rows": table_rows,
            "stamp": torch.tensor([STAMP], dtype=torch.int32),
        }
        self.verify = shared | {
            "token_ids": self.ints(VOCAB, num_rows).int(),
            "num_given": (query_lens - torch.minimum(self.ints(longest + 1, num_seqs), counts)).int(),
            "num_draft_tokens": (counts - 1).clamp(min=0).int(),
        }
        self.extension = shared | {
            "token_ids": self.ints(VOCAB, num_rows).int(),
            "num_drawn": counts.int(),
            "last_rows": torch.full((num_seqs,), POISON),
        }
        shape = (num_draws, num_seqs)
        self.proposals = shared | {
            "first_len": (1 + self.ints(20, num_seqs)) * live,
            "first_index": self.ints(2**40, num_seqs) * live,
            "most": self.ints(num_draws + 1, num_seqs) * live,
            "room": (self.ints(9, num_seqs) - 1) * live,
            "num_drawn": counts.int(),
            "token_index": torch.full(shape, POISON),
            "is_wanted": torch.full(shape, POISON, dtype=torch.int32),
            "counts": torch.full(shape, POISON, dtype=torch.int32),
            "seq_lens": torch.full((num_draws - 1, num_seqs), POISON, dtype=torch.int32),
            "positions": torch.full((num_draws - 1, num_seqs), POISON),
            "slots": torch.full((num_draws - 1, num_seqs), POISON),
        }
        self.block_table = self.ints(70_000, num_seqs, 12).int().to(device)
        drawn = torch.cat([self.ints(12, self.num_table_rows, 1) - 2, self.tokens(self.num_table_rows, 8)], 1)
        stamps = STAMP - self.ints(2, self.num_table_rows, 1)
        status = self.ints(2, self.num_table_rows, 1)
        self.drawn = drawn.int().to(device)
        self.proposed = torch.cat([stamps, status, self.tokens(self.num_table_rows, 7)], 1).int().to(device)
        for name in ("verify", "extension", "proposals"):
            setattr(self, name, {key: tensor.to(device) for key, tensor in getattr(self, name).items()})

    def ints(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def tokens(self, *shape: int) -> torch.Tensor:
        """Some of which are none."""
        return self.ints(2 * VOCAB, *shape) - 20


CASES = ((1, 1, 1), (1, 4, 3), (5, 8, 7), (64, 4, 3), (70, 2, 2))


DEVICES = {"plain": "cpu", "kernel": "cpu", "kernel on a GPU": "cuda"}
MARKS: dict[str, Any] = {"plain": (), "kernel": INTERPRETED, "kernel on a GPU": pytest.mark.gpu}


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def ops(request: pytest.FixtureRequest) -> tuple[TokenTableOps, torch.device]:
    """Each implementation, and where it runs."""
    return (plain if request.param == "plain" else kernel), torch.device(DEVICES[request.param])


Ops = tuple[TokenTableOps, torch.device]


def pairs(device: torch.device) -> list[tuple[Case, Case]]:
    """The same cases twice: for an implementation, and for the judge."""
    return [(Case(device, *sizes, seed), Case(CPU, *sizes, seed)) for sizes in CASES for seed in range(2)]


def assert_equal(found: Tensors, expected: Tensors) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name].cpu(), tensor), name


def test_read_tokens(ops: Ops) -> None:
    for case, judged in pairs(ops[1]):
        for width in (0, 3, 7):
            results = []
            for module, given in ((ops[0], case), (naive, judged)):
                shapes = (given.num_rows,), (given.num_seqs, width), (given.num_seqs,)
                found = [torch.full(shape, POISON, dtype=torch.int32, device=given.device) for shape in shapes]
                module.read_tokens(given.verify, given.drawn, given.proposed, *found, vocab_size=VOCAB)
                results.append({"token_ids": found[0], "window": found[1], "draft_status": found[2]})
            assert_equal(*results)


def test_store_drawn(ops: Ops) -> None:
    for case, judged in pairs(ops[1]):
        for width in (1, 5, 8):
            token_ids, accepted = judged.tokens(judged.num_seqs, width), judged.ints(width, judged.num_seqs).int()
            for module, given in ((ops[0], case), (naive, judged)):
                arguments = (tensor.to(given.device) for tensor in (token_ids, accepted, judged.verify["table_rows"]))
                module.store_drawn(*arguments, given.drawn)
            assert torch.equal(case.drawn[:-1].cpu(), judged.drawn[:-1])


def test_read_drawn(ops: Ops) -> None:
    for case, judged in pairs(ops[1]):
        ops[0].read_drawn(case.extension, case.drawn, vocab_size=VOCAB)
        naive.read_drawn(judged.extension, judged.drawn, vocab_size=VOCAB)
        assert_equal(case.extension, judged.extension)


def test_plan_steps(ops: Ops) -> None:
    for case, judged in pairs(ops[1]):
        ops[0].plan_steps(case.proposals, case.block_table, case.drawn, block_size=BLOCK_SIZE)
        naive.plan_steps(judged.proposals, judged.block_table, judged.drawn, block_size=BLOCK_SIZE)
        assert_equal(case.proposals, judged.proposals)


def test_store_proposals(ops: Ops) -> None:
    for case, judged in pairs(ops[1]):
        shape = judged.proposals["counts"].shape
        token_ids, status = judged.ints(VOCAB, *shape), judged.ints(2, *shape).int()
        for name in ("is_wanted", "counts"):
            judged.proposals[name] = judged.ints(2, *shape).int()
            case.proposals[name] = judged.proposals[name].to(ops[1])
        for module, given in ((ops[0], case), (naive, judged)):
            module.store_proposals(token_ids.to(given.device), status.to(given.device), given.proposals, given.proposed)
        assert torch.equal(case.proposed[:-1].cpu(), judged.proposed[:-1])


@pytest.mark.parametrize("module", [plain, pytest.param(kernel, marks=INTERPRETED)])
def test_a_tensor_whose_rows_lie_apart_is_refused(module: TokenTableOps) -> None:
    case = Case(CPU, 2, 2, 2, 0)
    embedded, status = torch.zeros(case.num_rows, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    window = torch.zeros(3, 2, dtype=torch.int32).T
    with pytest.raises(ValueError, match="window: got last stride 2"):
        module.read_tokens(case.verify, case.drawn, case.proposed, embedded, window, status, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="output_token_ids: got"):
        module.store_drawn(window.long(), status, case.verify["table_rows"], case.drawn)


def test_host_given_and_device_given_proposals_stand_side_by_side() -> None:
    """A prompt's two rows; proposals of the draft's; proposals of the host's; a last token that only the table has; a
    draft step that is not the one asked for."""
    step = {
        "token_ids": torch.tensor([1, 2, 3, 0, 0, 4, 5, 6, 0, 7, 0], dtype=torch.int32),
        "sequence": torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 4]),
        "cu_seqlens": torch.tensor([0, 2, 5, 8, 9, 11], dtype=torch.int32),
        "num_given": torch.tensor([2, 1, 3, 0, 1], dtype=torch.int32),
        "table_rows": torch.tensor([4, 0, 1, 2, 3]),
        "num_draft_tokens": torch.tensor([0, 2, 2, 0, 1], dtype=torch.int32),
        "stamp": torch.tensor([STAMP], dtype=torch.int32),
    }
    drawn = torch.tensor([[0, 90, 91]] * 2 + [[1, 30, 31]] + [[0, 90, 91]] * 3, dtype=torch.int32)
    proposed = torch.tensor([[7, 0, 20, 21], [7, 0, 22, 23], [7, 1, -1, -1], [6, 0, 24, 25], [7, 0, 8, 9], [0] * 4])
    embedded, window, status = (torch.zeros(shape, dtype=torch.int32) for shape in ((11,), (5, 2), (5,)))
    plain.read_tokens(step, drawn, proposed.int(), embedded, window, status, vocab_size=VOCAB)
    assert embedded.tolist() == [1, 2, 3, 20, 21, 4, 5, 6, 31, 7, 0]
    assert window.tolist() == [[-1, -1], [20, 21], [5, 6], [-1, -1], [-1, -1]]
    assert status.tolist() == [0, 0, 0, 1, STATUS_NOT_FINITE]


def test_a_failure_that_counts_takes_all_tokens_of_its_sequence() -> None:
    proposed = torch.full((4, 6), 9, dtype=torch.int32)
    step = {
        "counts": torch.tensor([[1, 1, 1], [1, 0, 1]], dtype=torch.int32),
        "is_wanted": torch.tensor([[1, 1, 1], [1, 0, 1]], dtype=torch.int32),
        "table_rows": torch.tensor([2, 0, 1]),
        "stamp": torch.tensor([stamp_of(2**31 + 5)], dtype=torch.int32),
    }
    status = torch.tensor([[0, 0, 0], [1, 1, 0]], dtype=torch.int32)
    plain.store_proposals(torch.tensor([[1, 2, 3], [4, 5, 6]]), status, step, proposed)
    none = PLACEHOLDER_TOKEN_ID
    assert proposed.tolist() == [[5, 0, 2, none, 9, 9], [5, 0, 3, 6, 9, 9], [5, 1, none, none, 9, 9], [9] * 6]


def test_a_count_that_cannot_be_is_cut() -> None:
    """Whatever stands in the table: no row, slot or length lies outside what the plan speaks of."""
    case = Case(CPU, 5, 4, 3, 3)
    case.drawn[:, 0] = 2**30
    plain.read_drawn(case.extension, case.drawn, vocab_size=VOCAB)
    ends = case.extension["cu_seqlens"][1:-1]
    assert (case.extension["last_rows"][:-1] == ends - 1).all()


def test_a_set_brings_its_own_ops() -> None:
    assert token_table_ops(KernelSet.plain()) is plain
