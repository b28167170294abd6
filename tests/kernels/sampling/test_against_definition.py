"""Plain sampling and its judge against docs/sampling.md written out token by token."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_kernels.sampling import naive, plain
from kimi_kernels.sampling.gumbel import gumbel_from_bits
from kimi_kernels.sampling.philox import noise_bits
from kimi_kernels.sampling.weights import token_weights
from support import sampling_definition as definition
from support.sampling_cases import SequenceCase, random_case, sampling_tensors
from support.sampling_logits import random_logits, random_mask, vocabulary_map


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([5, 33, 64, 65]),
    num_sequences=st.integers(1, 4),
    has_map=st.booleans(),
    has_mask=st.booleans(),
)
def test_same_token_and_status(seed: int, vocab_size: int, num_sequences: int, has_map: bool, has_mask: bool) -> None:
    check_batch(random.Random(seed), vocab_size, num_sequences, has_map, has_mask)


@pytest.mark.parametrize("seed", range(4))
def test_same_token_and_status_at_1000_tokens(seed: int) -> None:
    check_batch(random.Random(seed), 1000, 3, has_map=seed % 2 == 1, has_mask=seed == 2)


def check_batch(rng: random.Random, vocab_size: int, num_sequences: int, has_map: bool, has_mask: bool) -> None:
    cases = [random_case(rng, vocab_size, num_window=3) for _ in range(num_sequences)]
    num_rows = sum(len(case.rows) for case in cases)
    columns = rng.sample(range(vocab_size), max(2, vocab_size * 3 // 4)) if has_map else list(range(vocab_size))
    logits = random_logits(rng, num_rows, len(columns))
    mask = random_mask(rng, num_rows, vocab_size) if has_mask else None
    inputs, rows = sampling_tensors(cases, mask)
    before = logits.clone()
    draft_map = vocabulary_map(columns, vocab_size) if has_map else None
    results = [ops.sample_tokens(logits, inputs, rows, draft_map) for ops in (plain, naive)]
    assert torch.equal(logits.nan_to_num(nan=77.0), before.nan_to_num(nan=77.0))
    row = 0
    for case in cases:
        for window_len in case.rows:
            by_token = dict(zip(columns, logits[row].numpy(), strict=True))
            words = None if mask is None else [int(word) & 0xFFFFFFFF for word in mask[row].tolist()]
            expected = definition.draw(by_token, case, window_len, words)
            for result in results:
                got = (int(result.token_ids[row]), int(result.status[row]))
                assert got == expected, f"row {row}, window_len {window_len}, {case}"
            row += 1


def test_bits_gumbel_and_weights_bit_for_bit() -> None:
    seed, index, vocab_size = 2**64 - 12345, 2**33 + 7, 103
    bits = noise_bits(torch.tensor([seed - 2**64]), torch.tensor([index]), vocab_size)
    expected_bits = [definition.bits_of(seed, index, token) for token in range(vocab_size)]
    assert bits[0].tolist() == expected_bits
    edges = [0, 1, 2, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 1, 3 * 2**30, 2**32 - 2, 2**32 - 1]
    noise = gumbel_from_bits(torch.tensor(expected_bits + edges))
    with np.errstate(all="ignore"):
        assert noise.tolist() == [float(definition.gumbel(value)) for value in expected_bits + edges]
        y = torch.cat((-torch.rand(500) * 30, torch.tensor([0.0, -0.0, -1e-10, -27.7, -28.0, -1e30]))) + 3.25
        expected = [definition.weight(value, np.float32(3.25)) for value in y.numpy()]
    assert token_weights(torch.cat((y, torch.tensor([3.25])))[None])[0, :-1].tolist() == expected


def test_rows_of_one_case_need_no_window() -> None:
    """The smallest call: one sequence, one row, nothing but a temperature."""
    logits = torch.linspace(-1, 1, 7)[None]
    inputs, rows = sampling_tensors([SequenceCase(seed=3)])
    expected = definition.draw(dict(enumerate(logits[0].numpy())), SequenceCase(seed=3), 0)
    assert (int(plain.sample_tokens(logits, inputs, rows).token_ids[0]), 0) == expected
