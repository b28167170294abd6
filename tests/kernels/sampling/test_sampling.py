"""Draws and masks, each implementation against the naive judge."""

import random
from types import ModuleType
from typing import Any

import pytest
import torch

from kimi_kernels.sampling import naive
from kimi_kernels.sampling_inputs import STATUS_NO_TOKEN_LEFT, STATUS_NOT_FINITE
from support.implementations import implementations
from support.sampling_cases import SequenceCase, sampling_tensors
from support.sampling_logits import assert_draws_as_naive, assert_masks_as_naive, random_mask, vocabulary_map

every_implementation = implementations("sampling")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where a device would make an infinity


@every_implementation
@pytest.mark.parametrize("seed", range(8))
def test_random_batches(ops: ModuleType, seed: int) -> None:
    vocab_size = random.Random(seed).choice([5, 33, 64, 65, 130])
    assert_draws_as_naive(ops.sample_tokens, seed, vocab_size, num_sequences=2)
    if "plain" in ops.__name__:  # the interpreter takes a second for each
        for more in range(100 + 8 * seed, 108 + 8 * seed):
            assert_draws_as_naive(ops.sample_tokens, more, vocab_size, num_sequences=1 + seed)


@every_implementation
@pytest.mark.parametrize("vocab_size", [33, 130])
def test_masks_in_place(ops: ModuleType, vocab_size: int) -> None:
    assert_masks_as_naive(ops.mask_logits, vocab_size)


@every_implementation
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_logits_and_rows_that_are_not_finite(ops: ModuleType, temperature: float) -> None:
    inputs, rows = sampling_tensors([SequenceCase(temperature=temperature, seed=row) for row in range(5)])
    logits = torch.zeros(5, 67)
    logits[1, 9] = torch.nan
    logits[2, 9] = torch.inf
    logits[3] = -torch.inf
    logits[4, :9] = -torch.inf
    got, expected = ops.sample_tokens(logits, inputs, rows), naive.sample_tokens(logits, inputs, rows)
    assert got.status.tolist()[1:4] == [STATUS_NOT_FINITE, STATUS_NOT_FINITE, STATUS_NO_TOKEN_LEFT]
    assert torch.equal(got.status, expected.status)
    assert torch.equal(got.token_ids, expected.token_ids)


@every_implementation
def test_no_rows(ops: ModuleType) -> None:
    inputs, rows = sampling_tensors([SequenceCase(rows=[])])
    assert ops.sample_tokens(torch.zeros(0, 9), inputs, rows).token_ids.shape == (0,)


@every_implementation
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3, 40)}, r"^logits: got shape \[3, 40\], expected \[2, any\]"),
        ({"logits": torch.zeros(2, 40, dtype=torch.float64)}, "^logits: got torch.float64"),
        ({"vocabulary_map": vocabulary_map(list(range(9)), 40)}, r"^vocabulary_map.* got shape \[9\], expected \[40\]"),
        ({"logits": torch.zeros(2, 100)}, "^logit_mask: got 2 words, expected at least 4"),
        (
            {"logits": torch.zeros(2, 9), "vocabulary_map": vocabulary_map(list(range(9)), 100)},
            "^logit_mask: got 2 words, expected at least 4",
        ),
    ],
)
def test_a_wrong_argument_is_named(ops: ModuleType, change: dict[str, Any], message: str) -> None:
    cases = [SequenceCase(), SequenceCase()]
    inputs, rows = sampling_tensors(cases, random_mask(random.Random(1), 2, 40))
    arguments = {"logits": torch.zeros(2, 40), "inputs": inputs, "rows": rows} | change
    with pytest.raises(ValueError, match=message):
        ops.sample_tokens(**arguments)


@every_implementation
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 40).half()}, "^logits: got torch.float16"),
        ({"logits": torch.zeros(40, 2).t()}, "^logits: got .*expected contiguous rows"),
        ({"mask_of_row": torch.zeros(3, dtype=torch.int32)}, r"^mask_of_row: got shape \[3\], expected \[2\]"),
        ({"logit_mask": torch.zeros(1, 1, dtype=torch.int32)}, "^logit_mask: got 1 words, expected at least 2"),
    ],
)
def test_a_wrong_mask_is_named(ops: ModuleType, change: dict[str, torch.Tensor], message: str) -> None:
    arguments = {
        "logits": torch.zeros(2, 40),
        "logit_mask": torch.zeros(1, 2, dtype=torch.int32),
        "mask_of_row": torch.zeros(2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        ops.mask_logits(**(arguments | change))
