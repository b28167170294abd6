"""What a draft step takes from the verify before it, and what it leaves for the next: kernels against the reference."""

from typing import Any

import pytest
import torch

from kimi_kernels.draft_steps import draft_step_ops, kernel, reference
from kimi_kernels.kernel_set import KernelSet
from support.interpreted import INTERPRETED

VOCAB = 50
BLOCK_SIZE = 4


def step(device: torch.device, num_seqs: int, num_draws: int, seed: int) -> dict[str, Any]:
    """Inputs of a random step: fewer sequences than the buckets have, some without room for all draws."""
    generator = torch.Generator().manual_seed(seed)

    def ints(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    num_rows, num_extended, num_live = 4 * num_seqs + 3, num_seqs + 2, max(num_seqs - 1, 1)
    live = (torch.arange(num_seqs) < num_live).long()
    poison = 2**30

    def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full(shape, poison, dtype=dtype)

    extension = {
        "token_ids": filled(torch.int32, num_rows),
        "last_rows": ints(num_rows - 4, num_extended),
        "drawn_places": ints(4 * num_extended, num_rows),
        "drawn_rows": ints(num_extended, num_extended),
    }
    proposals = {
        "first_len": (1 + ints(20, num_seqs)) * live,
        "first_index": ints(2**40, num_seqs) * live,
        "most": ints(num_draws + 1, num_seqs) * live,
        "room": (ints(9, num_seqs) - 1) * live,
        "drawn_rows": ints(num_extended, num_seqs) * live,
        "token_index": filled(torch.int64, num_draws, num_seqs),
        "is_wanted": filled(torch.int32, num_draws, num_seqs),
        "counts": filled(torch.int32, num_draws, num_seqs),
        "seq_lens": filled(torch.int32, num_draws - 1, num_seqs),
        "positions": filled(torch.int64, num_draws - 1, num_seqs),
        "slots": filled(torch.int64, num_draws - 1, num_seqs),
    }
    tensors = {
        "block_table": ints(70_000, num_seqs, 12).int(),
        "output_token_ids": ints(2 * VOCAB, num_extended, 4) - 20,
        "num_accepted_tokens": ints(4, num_extended).int(),
    }
    return {
        "extension": {name: tensor.to(device) for name, tensor in extension.items()},
        "proposals": {name: tensor.to(device) for name, tensor in proposals.items()},
        **{name: tensor.to(device) for name, tensor in tensors.items()},
    }


def check_follow(device: torch.device) -> None:
    for num_seqs, num_draws in ((1, 1), (1, 3), (5, 7), (64, 3), (70, 2)):
        ours, theirs = (step(device, num_seqs, num_draws, num_seqs) for _ in range(2))
        kernel.follow_verify(**ours, block_size=BLOCK_SIZE, vocab_size=VOCAB)
        reference.follow_verify(**theirs, block_size=BLOCK_SIZE, vocab_size=VOCAB)
        for group in ("extension", "proposals"):
            for name, expected in theirs[group].items():
                assert torch.equal(ours[group][name], expected), (num_seqs, num_draws, name)


def check_leave(device: torch.device) -> None:
    for num_seqs, num_draws in ((1, 1), (3, 7), (64, 3), (70, 2)):
        generator = torch.Generator().manual_seed(num_seqs)
        shape = (num_draws, num_seqs)
        given = [
            torch.randint(0, VOCAB, shape, generator=generator).to(device),
            *(torch.randint(0, 2, shape, generator=generator).int().to(device) for _ in range(3)),
        ]
        ours, theirs = (torch.full((9, num_seqs + 5), 77, dtype=torch.int32, device=device) for _ in range(2))
        kernel.leave_tokens(*given, ours)
        reference.leave_tokens(*given, theirs)
        assert torch.equal(ours, theirs)
        assert (theirs[1 + num_draws :] == 77).all() and (theirs[:, num_seqs:] == 77).all()


@pytest.mark.parametrize("check", [pytest.param(check_follow), pytest.param(check_leave)])
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_kernels_equal_the_reference(check: Any, device: str) -> None:
    check(torch.device(device))


def test_a_failure_that_counts_takes_all_tokens_of_its_sequence() -> None:
    left = torch.full((4, 3), 9, dtype=torch.int32)
    token_ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    status = torch.tensor([[0, 0, 0], [1, 1, 0]], dtype=torch.int32)
    counts = torch.tensor([[1, 1, 1], [1, 0, 1]], dtype=torch.int32)
    wanted = torch.tensor([[1, 1, 1], [1, 0, 1]], dtype=torch.int32)
    reference.leave_tokens(token_ids, status, wanted, counts, left)
    assert left.tolist() == [[1, 0, 0], [-1, 2, 3], [-1, -1, 6], [9, 9, 9]]


def test_a_set_brings_its_own_ops() -> None:
    assert draft_step_ops(KernelSet.reference()) is reference
