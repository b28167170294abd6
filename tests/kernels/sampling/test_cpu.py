"""The CPU kernel set's sampling: the reference's tokens, statuses and log-probabilities, bit for bit."""

import random
from collections import OrderedDict

import pytest
import torch

from kimi_kernels.sampling import cpu, reference
from kimi_kernels.sampling.cpu import NOISE_ROWS, gumbel_rows, sample_tokens, verify_draft_tokens
from kimi_kernels.sampling.gumbel_reference import gumbel_from_bits
from kimi_kernels.sampling.philox_reference import noise_bits
from kimi_kernels.sampling_inputs import (
    PLACEHOLDER_TOKEN_ID,
    STATUS_NO_TOKEN_LEFT,
    STATUS_NOT_FINITE,
    SampleOutput,
    VocabularyMap,
)
from support.sampling_cases import SequenceCase, random_case, sampling_tensors

VOCAB_SIZE = 67


def assert_same(got: SampleOutput, expected: SampleOutput) -> None:
    for name in SampleOutput.__slots__:
        mine, other = getattr(got, name), getattr(expected, name)
        assert (mine is None) == (other is None), name
        if mine is not None:
            assert mine.dtype == other.dtype, name
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("seed", range(40))
def test_random_batches_draw_what_the_reference_draws(seed: int) -> None:
    """Every processor and filter, greedy and noisy rows mixed, ties, a mask, rows that hold NaN or infinities."""
    rng = random.Random(seed)
    cases = [random_case(rng, VOCAB_SIZE, num_window=3) for _ in range(rng.randrange(1, 6))]
    num_rows = sum(len(case.rows) for case in cases)
    mask = torch.randint(-(2**31), 2**31, (num_rows, 3), dtype=torch.int32) if seed % 3 == 0 else None
    inputs, rows = sampling_tensors(cases, mask)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    if seed % 4 == 0:
        logits = logits.round()
    if seed % 5 == 0:
        logits[0, 3] = torch.nan
        logits[-1, 5] = torch.inf
    before = logits.clone()
    for num_logprobs in (None, 4):
        expected = reference.sample_tokens(logits, inputs, rows, num_logprobs=num_logprobs)
        assert_same(sample_tokens(logits, inputs, rows, num_logprobs=num_logprobs), expected)
    assert torch.equal(logits.isnan(), before.isnan())
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the logits changed"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_rows_with_equal_logits_and_wrong_rows(temperature: float) -> None:
    """The paths without processors: the lowest id of equals, and each kind of row that is not finite."""
    cases = [SequenceCase(temperature=temperature, seed=row) for row in range(5)]
    inputs, rows = sampling_tensors(cases)
    logits = torch.zeros(5, VOCAB_SIZE)
    logits[1, 9] = torch.nan
    logits[2, 9] = torch.inf
    logits[3] = -torch.inf
    logits[4, :9] = -torch.inf
    got = sample_tokens(logits, inputs, rows)
    assert got.status.tolist()[1:4] == [STATUS_NOT_FINITE, STATUS_NOT_FINITE, STATUS_NO_TOKEN_LEFT]
    assert_same(got, reference.sample_tokens(logits, inputs, rows))


@pytest.mark.parametrize("seed", range(10))
def test_a_drafts_own_columns_draw_the_targets_noise(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randperm(VOCAB_SIZE, generator=generator)[:29]
    columns = torch.full((VOCAB_SIZE,), -1, dtype=torch.int64)
    columns[token_ids] = torch.arange(29)
    vocabulary_map = VocabularyMap(token_id_of_column=token_ids, column_of_token_id=columns)
    rng = random.Random(seed)
    inputs, rows = sampling_tensors([random_case(rng, VOCAB_SIZE, num_window=2) for _ in range(3)])
    logits = torch.randn(len(rows.sequence), 29, generator=generator)
    expected = reference.sample_tokens(logits, inputs, rows, vocabulary_map)
    assert_same(sample_tokens(logits, inputs, rows, vocabulary_map), expected)


def test_noise_has_the_defined_bits_in_any_order_of_asking() -> None:
    seeds = [0, -1, 2**62, 5, 5, 5, 0]
    indices = [0, 3, 2**33 + 1, NOISE_ROWS - 1, NOISE_ROWS, 0, NOISE_ROWS + 1]
    expected = gumbel_from_bits(noise_bits(torch.tensor(seeds), torch.tensor(indices), VOCAB_SIZE)).double()
    assert torch.equal(gumbel_rows(seeds, indices, VOCAB_SIZE), expected)
    assert torch.equal(gumbel_rows(seeds[::-1], indices[::-1], VOCAB_SIZE), expected.flip(0))
    narrow = gumbel_from_bits(noise_bits(torch.tensor([5]), torch.tensor([0]), 9)).double()
    assert torch.equal(gumbel_rows([5], [0], 9), narrow)


def test_no_more_noise_is_kept_than_its_bound_or_than_one_call_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_kept", OrderedDict())
    monkeypatch.setattr(cpu, "KEPT_VALUES", 6 * NOISE_ROWS * VOCAB_SIZE)
    monkeypatch.setattr(cpu, "MADE_VALUES", 3 * NOISE_ROWS * VOCAB_SIZE)
    seeds = list(range(20))
    expected = gumbel_from_bits(noise_bits(torch.tensor(seeds), torch.full((20,), 9), VOCAB_SIZE)).double()
    for first, count, kept in ((0, 4, 4), (2, 4, 6), (7, 5, 6), (0, 20, 20), (3, 1, 6)):
        part = slice(first, first + count)
        assert torch.equal(gumbel_rows(seeds[part], [9] * count, VOCAB_SIZE), expected[part])
        assert len(cpu._kept) == kept
        assert set(list(cpu._kept)[-count:]) == {(seed, 9 // NOISE_ROWS, VOCAB_SIZE) for seed in seeds[part]}


def test_kept_noise_takes_32_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_kept", OrderedDict())
    for seed in range(140):
        gumbel_rows([seed], [0], 4096)
    assert sum(row.nbytes for rows in cpu._kept.values() for row in rows) == 32 << 20


def test_no_rows() -> None:
    inputs, rows = sampling_tensors([SequenceCase(rows=[])])
    assert sample_tokens(torch.zeros(0, VOCAB_SIZE), inputs, rows).token_ids.shape == (0,)


def test_a_kept_row_of_noise_does_not_change() -> None:
    first = gumbel_rows([3], [1], VOCAB_SIZE)
    kept = first.clone()
    first.fill_(0)
    inputs, rows = sampling_tensors([SequenceCase(seed=3, top_k=2)])
    sample_tokens(torch.randn(1, VOCAB_SIZE), inputs, rows)
    assert torch.equal(gumbel_rows([3], [1], VOCAB_SIZE), kept)


@pytest.mark.parametrize("seed", range(30))
def test_verification_equals_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    width = rng.randrange(8)
    lengths = [rng.randrange(width + 1) for _ in range(rng.randrange(1, 6))]
    first_row = [sum(lengths[:b]) + b for b in range(len(lengths))]
    num_rows = sum(lengths) + len(lengths)
    token_ids = torch.tensor([rng.randrange(2) for _ in range(num_rows)])
    status = torch.tensor([STATUS_NOT_FINITE * (rng.random() < 0.2) for _ in range(num_rows)], dtype=torch.int32)
    if seed % 2:
        token_ids[status != 0] = PLACEHOLDER_TOKEN_ID
    drafts = torch.tensor([[rng.randrange(2) for _ in range(width)] for _ in lengths], dtype=torch.int32)
    drafts = drafts.view(len(lengths), width)
    arguments = (token_ids, status, torch.tensor(first_row), drafts, torch.tensor(lengths, dtype=torch.int32))
    got, expected = verify_draft_tokens(*arguments), reference.verify_draft_tokens(*arguments)
    for name in ("output_token_ids", "num_accepted_tokens", "last_row", "status"):
        assert getattr(got, name).dtype == getattr(expected, name).dtype, name
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
