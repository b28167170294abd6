"""Noise that plain sampling keeps: its bits are the defined ones whoever asks, and its memory has a bound."""

from collections import OrderedDict

import pytest
import torch

from kimi_kernels.sampling import plain
from kimi_kernels.sampling.gumbel import gumbel_from_bits
from kimi_kernels.sampling.philox import noise_bits
from kimi_kernels.sampling.plain import NOISE_ROWS, gumbel_rows, sample_tokens
from support.sampling_cases import SequenceCase, sampling_tensors

VOCAB_SIZE = 67


def test_noise_has_the_defined_bits_in_any_order_of_asking() -> None:
    seeds = [0, -1, 2**62, 5, 5, 5, 0]
    indices = [0, 3, 2**31 + 77, NOISE_ROWS - 1, NOISE_ROWS, 0, NOISE_ROWS + 1]
    expected = gumbel_from_bits(noise_bits(torch.tensor(seeds), torch.tensor(indices), VOCAB_SIZE)).double()
    assert torch.equal(gumbel_rows(seeds, indices, VOCAB_SIZE), expected)
    assert torch.equal(gumbel_rows(seeds[::-1], indices[::-1], VOCAB_SIZE), expected.flip(0))
    narrow = gumbel_from_bits(noise_bits(torch.tensor([5]), torch.tensor([0]), 9)).double()
    assert torch.equal(gumbel_rows([5], [0], 9), narrow)


def test_no_more_noise_is_kept_than_its_bound_or_than_one_call_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_kept", OrderedDict())
    monkeypatch.setattr(plain, "KEPT_VALUES", 6 * NOISE_ROWS * VOCAB_SIZE)
    monkeypatch.setattr(plain, "MADE_VALUES", 3 * NOISE_ROWS * VOCAB_SIZE)
    seeds = list(range(20))
    expected = gumbel_from_bits(noise_bits(torch.tensor(seeds), torch.full((20,), 9), VOCAB_SIZE)).double()
    for first, count, kept in ((0, 4, 4), (2, 4, 6), (7, 5, 6), (0, 20, 20), (3, 1, 6)):
        part = slice(first, first + count)
        assert torch.equal(gumbel_rows(seeds[part], [9] * count, VOCAB_SIZE), expected[part])
        assert len(plain._kept) == kept
        assert set(list(plain._kept)[-count:]) == {(seed, 9 // NOISE_ROWS, VOCAB_SIZE) for seed in seeds[part]}


def test_kept_noise_takes_32_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_kept", OrderedDict())
    for seed in range(140):
        gumbel_rows([seed], [0], 4096)
    assert sum(row.nbytes for rows in plain._kept.values() for row in rows) == 32 << 20


def test_a_kept_row_of_noise_does_not_change() -> None:
    first = gumbel_rows([3], [1], VOCAB_SIZE)
    kept = first.clone()
    first.fill_(0)
    inputs, rows = sampling_tensors([SequenceCase(seed=3, top_k=2)])
    sample_tokens(torch.randn(1, VOCAB_SIZE), inputs, rows)
    assert torch.equal(gumbel_rows([3], [1], VOCAB_SIZE), kept)
