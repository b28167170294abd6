"""Accept while the draft guessed what the target drew."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_kernels.sampling.reference import verify_draft_tokens
from kimi_kernels.sampling_inputs import PLACEHOLDER_TOKEN_ID, STATUS_NOT_FINITE, VerifyOutput


def verify(
    drawn: list[list[int]], draft: list[list[int]], width: int, status: list[list[int]] | None = None
) -> VerifyOutput:
    """One list of drawn tokens (and of statuses) a sequence, one longer than its draft tokens."""
    status = status or [[0] * len(tokens) for tokens in drawn]
    lengths = torch.tensor([len(tokens) for tokens in drawn])
    table = torch.ones(len(draft), width, dtype=torch.int32)  # what lies beyond must not count, match as it may
    for row, tokens in enumerate(draft):
        table[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    return verify_draft_tokens(
        torch.tensor([token for tokens in drawn for token in tokens]),
        torch.tensor([value for values in status for value in values], dtype=torch.int32),
        lengths.cumsum(0) - lengths,
        table,
        torch.tensor([len(tokens) for tokens in draft], dtype=torch.int32),
    )


def test_rejection_bonus_and_no_draft() -> None:
    result = verify([[5, 6, 7], [5, 6, 7], [1], [8, 9]], [[5, 0], [5, 6], [], [0]], width=2)
    assert result.num_accepted_tokens.tolist() == [1, 2, 0, 0]
    assert result.output_token_ids.tolist() == [[5, 6, -1], [5, 6, 7], [1, -1, -1], [8, -1, -1]]
    assert result.last_row.tolist() == [1, 5, 6, 7]
    assert result.status.tolist() == [0, 0, 0, 0]


def test_a_match_after_a_rejection_does_not_count() -> None:
    assert verify([[1, 2, 3, 4]], [[9, 2, 3]], width=3).num_accepted_tokens.tolist() == [0]


def test_no_window() -> None:
    result = verify([[4], [5]], [[], []], width=0)
    assert result.output_token_ids.tolist() == [[4], [5]]
    assert result.num_accepted_tokens.tolist() == [0, 0]
    assert result.last_row.tolist() == [0, 1]


def test_status_of_a_row_that_is_used_fails_the_sequence() -> None:
    bad, gone = STATUS_NOT_FINITE, PLACEHOLDER_TOKEN_ID
    result = verify(
        [[5, gone, 7], [5, gone, 7], [gone, 6]], [[5, 6], [4, 6], [gone]], 2, [[0, bad, 0], [0, bad, 0], [bad, 0]]
    )
    assert result.status.tolist() == [bad, 0, bad]  # the second rejects before it comes to the bad row
    assert result.num_accepted_tokens.tolist() == [1, 0, 0]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), width=st.integers(0, 7), batch_size=st.integers(1, 9))
def test_equals_a_loop(seed: int, width: int, batch_size: int) -> None:
    rng = random.Random(seed)
    draft = [[rng.randrange(3) for _ in range(rng.randrange(width + 1))] for _ in range(batch_size)]
    drawn = [[rng.randrange(3) for _ in range(len(tokens) + 1)] for tokens in draft]
    status = [[int(rng.random() < 0.1) for _ in tokens] for tokens in drawn]
    result = verify(drawn, draft, width, status)
    first = 0
    for b in range(batch_size):
        accepted = 0
        while accepted < len(draft[b]) and not status[b][accepted] and drawn[b][accepted] == draft[b][accepted]:
            accepted += 1
        expected = [*drawn[b][: accepted + 1], *[PLACEHOLDER_TOKEN_ID] * (width - accepted)]
        assert result.output_token_ids[b].tolist() == expected
        assert result.num_accepted_tokens[b] == accepted
        assert result.last_row[b] == first + accepted
        assert result.status[b] == status[b][accepted]
        first += len(drawn[b])
