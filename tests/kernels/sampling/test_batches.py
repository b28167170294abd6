"""Rows do not affect each other, counts follow the window, bad words cross its border, bf16 is taken as it is."""

import random
from dataclasses import replace

import pytest
import torch

from kimi_kernels.sampling.plain import sample_tokens
from kimi_kernels.sampling_inputs import (
    BANNED_FOREVER,
    PLACEHOLDER_TOKEN_ID,
    STATUS_NO_TOKEN_LEFT,
    STATUS_NOT_FINITE,
    STATUS_OK,
    SamplingInputs,
    SamplingRows,
)
from support.sampling_cases import SequenceCase, random_case, sampling_tensors

VOCAB_SIZE = 48


def batch(seed: int, num_sequences: int) -> tuple[torch.Tensor, SamplingInputs, SamplingRows]:
    rng = random.Random(seed)
    inputs, rows = sampling_tensors([random_case(rng, VOCAB_SIZE, num_window=3) for _ in range(num_sequences)])
    logits = torch.randn(rows.sequence.numel(), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2
    return logits, inputs, rows


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(poison: float) -> None:
    logits, inputs, rows = batch(1, 8)
    inputs = replace(inputs, bias_offsets=torch.zeros_like(inputs.bias_offsets))
    clean = sample_tokens(logits, inputs, rows, num_logprobs=3)
    poisoned = logits.clone()
    bad = torch.zeros(logits.shape[0], dtype=torch.bool)
    bad[[0, 3, logits.shape[0] - 1]] = True
    poisoned[bad, 7] = poison
    result = sample_tokens(poisoned, inputs, rows, num_logprobs=3)
    assert (result.status[bad] == STATUS_NOT_FINITE).all()
    assert (result.token_ids[bad] == PLACEHOLDER_TOKEN_ID).all()
    for name in ("token_ids", "status", "logprobs", "top_logprob_ids", "top_logprobs"):
        assert torch.equal(getattr(result, name)[~bad], getattr(clean, name)[~bad]), name


def test_all_banned_is_told_from_logits_that_are_not_finite() -> None:
    case = SequenceCase(bans=dict.fromkeys(range(5), BANNED_FOREVER))
    inputs, rows = sampling_tensors([case, SequenceCase(temperature=0.0, bans=case.bans), SequenceCase()])
    result = sample_tokens(torch.zeros(3, 5), inputs, rows)
    assert result.status.tolist() == [STATUS_NO_TOKEN_LEFT, STATUS_NO_TOKEN_LEFT, STATUS_OK]
    assert result.token_ids[:2].tolist() == [PLACEHOLDER_TOKEN_ID] * 2


@pytest.mark.parametrize("seed", range(5))
def test_each_row_alone_draws_the_same(seed: int) -> None:
    logits, inputs, rows = batch(seed, 6)
    together = sample_tokens(logits, inputs, rows, num_logprobs=2)
    for row in torch.randperm(logits.shape[0]).tolist():
        one = replace(
            rows,
            sequence=rows.sequence[row : row + 1],
            token_index=rows.token_index[row : row + 1],
            window_len=rows.window_len[row : row + 1],
        )
        alone = sample_tokens(logits[row : row + 1], inputs, one, num_logprobs=2)
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.status[0] == together.status[row]
        assert alone.logprobs is not None and together.logprobs is not None
        assert alone.logprobs[0] == together.logprobs[row] or alone.status[0] != STATUS_OK


def test_penalties_count_the_window_before_the_row() -> None:
    """Row w sees the first w window tokens: each pushes its token below the next."""
    case = SequenceCase(
        temperature=0.0, frequency_penalty=1.5, prompt=[4], output=[0], window=[1, 2, 1], rows=[0, 1, 2, 3]
    )
    logits = torch.tensor([3.0, 2.9, 2.8, 0.0, 1.0]).expand(4, 5).contiguous()
    inputs, rows = sampling_tensors([case])
    # Penalised: row 0 (1.5, 2.9, 2.8), row 1 (1.5, 1.4, 2.8), row 2 (1.5, 1.4, 1.3), row 3 (1.5, -0.1, 1.3).
    assert sample_tokens(logits, inputs, rows).token_ids.tolist() == [1, 2, 0, 0]


def test_prompt_tokens_get_the_repetition_penalty_only() -> None:
    repeated = SequenceCase(temperature=0.0, repetition_penalty=2.0, prompt=[0])
    present = SequenceCase(temperature=0.0, presence_penalty=2.0, prompt=[0])
    inputs, rows = sampling_tensors([repeated, present])
    assert sample_tokens(torch.tensor([[3.0, 2.0], [3.0, 2.0]]), inputs, rows).token_ids.tolist() == [1, 0]


def test_negative_logits_move_down_too() -> None:
    case = SequenceCase(temperature=0.0, repetition_penalty=2.0, prompt=[0])
    inputs, rows = sampling_tensors([case])
    assert sample_tokens(torch.tensor([[-1.0, -1.5]]), inputs, rows).token_ids.tolist() == [1]


@pytest.mark.parametrize(
    ("history", "window", "is_banned"),
    [
        ([4, 1, 2], [], [True]),
        ([4, 1], [2], [False, True]),
        ([4], [1, 2], [False, False, True]),
        ([1, 2, 4], [1], [False, False]),
        ([2], [], [False]),
        ([2], [1, 2, 2], [False, False, True, False]),
    ],
)
def test_bad_words_across_the_window_border(history: list[int], window: list[int], is_banned: list[bool]) -> None:
    case = SequenceCase(
        temperature=0.0, prompt=history, window=window, rows=list(range(len(window) + 1)), bad_words=[[1, 2, 3]]
    )
    # A neighbour with a longer word widens the history tail beyond this sequence's history.
    inputs, rows = sampling_tensors([case, SequenceCase(bad_words=[[5, 5, 5, 5, 0]])])
    logits = torch.tensor([0.0, 0.0, 0.0, 2.0, 1.0, 0.0]).expand(len(is_banned) + 1, 6).contiguous()
    drawn = sample_tokens(logits, inputs, rows).token_ids.tolist()[:-1]
    assert drawn == [4 if banned else 3 for banned in is_banned]


def test_ban_until_ends_at_its_index() -> None:
    case = SequenceCase(temperature=0.0, prompt=[1, 1], window=[0, 0], rows=[0, 1, 2], bans={3: 4})
    inputs, rows = sampling_tensors([case])
    logits = torch.tensor([0.0, 0.0, 1.0, 2.0]).expand(3, 4).contiguous()
    assert sample_tokens(logits, inputs, rows).token_ids.tolist() == [2, 2, 3]


def test_greedy_takes_the_lowest_of_equals() -> None:
    inputs, rows = sampling_tensors([SequenceCase(temperature=9.9e-6)])
    assert sample_tokens(torch.tensor([[0.0, 2.0, 2.0, 2.0]]), inputs, rows).token_ids.tolist() == [1]


def test_noise_keeps_its_bits_beside_a_large_logit() -> None:
    """Equal logits are still drawn evenly at a tiny temperature: float32 sums would round the noise to a tie."""
    logits = torch.tensor([2000.0, 2000.0, 1999.0]).expand(4000, 3)
    inputs, rows = sampling_tensors([SequenceCase(temperature=1.1e-5)])
    many = replace(
        rows,
        sequence=torch.zeros(4000, dtype=torch.int64),
        token_index=torch.arange(4000),
        window_len=torch.zeros(4000, dtype=torch.int32),
    )
    share = sample_tokens(logits, inputs, many).token_ids.bincount(minlength=3) / 4000
    assert share[2] == 0
    assert abs(share[0] - 0.5) < 0.04


def test_bf16_equals_its_float32() -> None:
    logits, inputs, rows = batch(3, 6)
    half = logits.bfloat16()
    assert torch.equal(sample_tokens(half, inputs, rows).token_ids, sample_tokens(half.float(), inputs, rows).token_ids)


def test_non_contiguous_logits() -> None:
    logits, inputs, rows = batch(4, 6)
    strided = torch.stack((logits, logits + 1), dim=2)[:, :, 0]
    assert torch.equal(sample_tokens(strided, inputs, rows).token_ids, sample_tokens(logits, inputs, rows).token_ids)


def neighbours_merged_by_inverse(divisor: float) -> torch.Tensor:
    """Two float32, the smaller first, equal times the rounded inverse and not equal divided."""
    value = torch.linspace(1, 2, 10_000)
    pair = torch.stack((value, torch.nextafter(value, torch.tensor(9.0))))
    by_product, by_division = pair * (torch.tensor(1.0) / divisor), pair / divisor
    merged = (by_product[0] == by_product[1]) & (by_division[0] != by_division[1])
    return pair[:, merged][:, 0]


def test_temperature_is_a_product_with_the_rounded_inverse() -> None:
    inputs, rows = sampling_tensors([SequenceCase(temperature=1.7, top_k=1)])
    assert sample_tokens(neighbours_merged_by_inverse(1.7)[None], inputs, rows).token_ids.tolist() == [0]


def test_repetition_is_a_product_with_the_rounded_inverse() -> None:
    inputs, rows = sampling_tensors([SequenceCase(temperature=0.0, repetition_penalty=1.3, prompt=[0, 1])])
    assert sample_tokens(neighbours_merged_by_inverse(1.3)[None], inputs, rows).token_ids.tolist() == [0]
