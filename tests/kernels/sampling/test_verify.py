"""Accept while the draft guessed what the target drew."""

import random
from types import ModuleType

import pytest
import torch

from kimi_kernels.sampling import naive
from kimi_kernels.sampling_inputs import PLACEHOLDER_TOKEN_ID, STATUS_NOT_FINITE, VerifyOutput
from support.device_kernels import device_kernel_set
from support.implementations import implementations

every_implementation = implementations("sampling")


def verify(
    ops: ModuleType, drawn: list[list[int]], draft: list[list[int]], width: int, status: list[list[int]] | None = None
) -> VerifyOutput:
    """One list of drawn tokens (and of statuses) a sequence, one longer than its draft tokens."""
    status = status or [[0] * len(tokens) for tokens in drawn]
    lengths = torch.tensor([len(tokens) for tokens in drawn])
    table = torch.ones(len(draft), width, dtype=torch.int32)  # what lies beyond must not count, match as it may
    for row, tokens in enumerate(draft):
        table[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    return ops.verify_draft_tokens(  # type: ignore[no-any-return]
        torch.tensor([token for tokens in drawn for token in tokens]),
        torch.tensor([value for values in status for value in values], dtype=torch.int32),
        lengths.cumsum(0) - lengths,
        table,
        torch.tensor([len(tokens) for tokens in draft], dtype=torch.int32),
    )


@every_implementation
def test_rejection_bonus_and_no_draft(ops: ModuleType) -> None:
    result = verify(ops, [[5, 6, 7], [5, 6, 7], [1], [8, 9]], [[5, 0], [5, 6], [], [0]], width=2)
    assert result.num_accepted_tokens.tolist() == [1, 2, 0, 0]
    assert result.output_token_ids.tolist() == [[5, 6, -1], [5, 6, 7], [1, -1, -1], [8, -1, -1]]
    assert result.last_row.tolist() == [1, 5, 6, 7]
    assert result.status.tolist() == [0, 0, 0, 0]


@every_implementation
def test_a_match_after_a_rejection_does_not_count(ops: ModuleType) -> None:
    assert verify(ops, [[1, 2, 3, 4]], [[9, 2, 3]], width=3).num_accepted_tokens.tolist() == [0]


@every_implementation
def test_no_window(ops: ModuleType) -> None:
    result = verify(ops, [[4], [5]], [[], []], width=0)
    assert result.output_token_ids.tolist() == [[4], [5]]
    assert result.num_accepted_tokens.tolist() == [0, 0]
    assert result.last_row.tolist() == [0, 1]


@every_implementation
def test_status_of_a_row_that_is_used_fails_the_sequence(ops: ModuleType) -> None:
    bad, gone = STATUS_NOT_FINITE, PLACEHOLDER_TOKEN_ID
    result = verify(
        ops, [[5, gone, 7], [5, gone, 7], [gone, 6]], [[5, 6], [4, 6], [gone]], 2, [[0, bad, 0], [0, bad, 0], [bad, 0]]
    )
    assert result.status.tolist() == [bad, 0, bad]  # the second rejects before it comes to the bad row
    assert result.num_accepted_tokens.tolist() == [1, 0, 0]


@every_implementation
@pytest.mark.parametrize("seed", range(12))
def test_equals_a_loop(ops: ModuleType, seed: int) -> None:
    rng, width = random.Random(seed), seed % 8
    draft = [[rng.randrange(3) for _ in range(rng.randrange(width + 1))] for _ in range(1 + seed)]
    drawn = [[rng.randrange(3) for _ in range(len(tokens) + 1)] for tokens in draft]
    status = [[int(rng.random() < 0.1) for _ in tokens] for tokens in drawn]
    got, expected = verify(ops, drawn, draft, width, status), verify(naive, drawn, draft, width, status)
    for name in VerifyOutput.__slots__:
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
        assert getattr(got, name).dtype == getattr(expected, name).dtype, name


def test_the_kernels_that_never_wait_accept_as_the_judge_does() -> None:
    """No value of a tensor without memory can be waited for: reading one raises."""
    ops, shapes = device_kernel_set(), torch.device("meta")
    for drawn, draft in (([[5, 6, 7], [1], [8, 9]], [[5, 0], [], [8]]), ([[4], [5]], [[], []])):
        width = max(map(len, draft))
        got, expected = verify(ops, drawn, draft, width), verify(naive, drawn, draft, width)  # type: ignore[arg-type]
        for name in VerifyOutput.__slots__:
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
            assert getattr(got, name).dtype == getattr(expected, name).dtype, name
    tokens, counts = torch.zeros(4, dtype=torch.int64, device=shapes), torch.zeros(2, dtype=torch.int32, device=shapes)
    ops.verify_draft_tokens(tokens, tokens.int(), counts.long(), counts[:, None], counts)


@every_implementation
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_row": torch.arange(3)}, r"^first_row: got shape \[3\], expected \[2\]"),
        ({"num_draft_tokens": torch.zeros(1, dtype=torch.int32)}, r"^num_draft_tokens: got shape \[1\]"),
        ({"status": torch.zeros(5, dtype=torch.int32)}, r"^status: got shape \[5\], expected \[4\]"),
        ({"draft_token_ids": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]}, "^draft_token_ids: got column stride 2"),
    ],
)
def test_a_wrong_argument_is_named(ops: ModuleType, change: dict[str, torch.Tensor], message: str) -> None:
    arguments = {
        "token_ids": torch.zeros(4, dtype=torch.int64),
        "status": torch.zeros(4, dtype=torch.int32),
        "first_row": torch.tensor([0, 2]),
        "draft_token_ids": torch.zeros(2, 1, dtype=torch.int32),
        "num_draft_tokens": torch.zeros(2, dtype=torch.int32),
    } | change
    with pytest.raises(ValueError, match=message):
        ops.verify_draft_tokens(**arguments)
