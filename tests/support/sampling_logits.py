"""Logits with ties and values that are not finite, masks, vocabulary maps; and an op against its naive judge."""

import random
from collections.abc import Callable

import torch

from kimi_kernels.sampling import naive
from kimi_kernels.sampling_inputs import SampleOutput, VocabularyMap
from support.sampling_cases import SequenceCase, random_case, sampling_tensors


def random_logits(rng: random.Random, num_rows: int, num_columns: int) -> torch.Tensor:
    """Few distinct values, so that ties are common, in some rows; some rows with bans, NaN, +inf, all -inf."""
    logits = torch.tensor([[rng.gauss(0, 3) for _ in range(num_columns)] for _ in range(num_rows)])
    for row in range(num_rows):
        kind = rng.random()
        if kind < 0.4:
            logits[row] = logits[row].round()
        elif kind < 0.5:
            logits[row] = 1.5
        elif kind < 0.6:
            logits[row, rng.randrange(num_columns)] = float("-inf")
        elif kind < 0.65:
            logits[row, rng.randrange(num_columns)] = rng.choice((float("nan"), float("inf")))
        elif kind < 0.67:
            logits[row] = float("-inf")
        elif kind < 0.7:
            logits[row] *= 1e37
    return logits


def random_mask(rng: random.Random, num_rows: int, vocab_size: int) -> torch.Tensor:
    """[num_rows, words]; every third row or so may draw all."""
    num_words = (vocab_size + 31) // 32
    words = [[rng.randrange(-(2**31), 2**31) for _ in range(num_words)] for _ in range(num_rows)]
    return torch.tensor([[-1] * num_words if rng.random() < 0.3 else row for row in words], dtype=torch.int32)


def assert_masks_as_naive(mask: Callable[..., None], vocab_size: int, device: str = "cpu") -> None:
    """Rows with a mask and rows without, in an order of their own; NaN and infinities under a mask and beside it."""
    rng, num_rows = random.Random(vocab_size), 9
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(5))
    for value in (float("nan"), float("inf"), float("-inf")):
        logits[torch.randint(num_rows, (6,)), torch.randint(vocab_size, (6,))] = value
    rows = sampling_tensors([SequenceCase() for _ in range(num_rows)], random_mask(rng, num_rows, vocab_size))[1]
    assert rows.logit_mask is not None
    assert 0 < len(rows.logit_mask) < num_rows
    expected, got = logits.clone(), logits.to(device)
    naive.mask_logits(expected, rows.logit_mask, rows.mask_of_row)
    mask(got, rows.logit_mask.to(device), rows.mask_of_row.to(device))  # type: ignore[union-attr]
    assert torch.equal(got.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(expected.isnan(), logits.isnan()), "bad logits stay bad"
    assert (expected == float("inf")).equal(logits == float("inf"))


def vocabulary_map(columns: list[int], vocab_size: int) -> VocabularyMap:
    column_of_token_id = torch.full((vocab_size,), -1, dtype=torch.int64)
    column_of_token_id[torch.tensor(columns)] = torch.arange(len(columns))
    return VocabularyMap(token_id_of_column=torch.tensor(columns), column_of_token_id=column_of_token_id)


def to_device(value: object, device: str) -> object:
    """A dataclass of tensors on another device."""
    fields = {name: getattr(value, name) for name in value.__dataclass_fields__}  # type: ignore[attr-defined]
    return type(value)(**{name: None if field is None else field.to(device) for name, field in fields.items()})


def assert_draws_as_naive(
    sample: Callable[..., SampleOutput], seed: int, vocab_size: int, num_sequences: int, device: str = "cpu"
) -> None:
    """One random batch, every feature on or off, bf16 or float32."""
    rng = random.Random(seed)
    cases = [random_case(rng, vocab_size, num_window=3) for _ in range(num_sequences)]
    num_rows = sum(len(case.rows) for case in cases)
    has_map = rng.random() < 0.4
    columns = rng.sample(range(vocab_size), max(2, vocab_size * 3 // 4)) if has_map else list(range(vocab_size))
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(rng, num_rows, len(columns)) if vocab_size < 3000 else None
    if logits is None:
        logits = torch.randn(num_rows, len(columns), generator=generator) * rng.choice((0.5, 2.0, 5.0))
    if rng.random() < 0.3:
        logits = logits.bfloat16()
    mask = random_mask(rng, num_rows, vocab_size) if rng.random() < 0.3 else None
    inputs, rows = sampling_tensors(cases, mask)
    draft_map = vocabulary_map(columns, vocab_size) if has_map else None
    expected = naive.sample_tokens(logits, inputs, rows, draft_map)
    moved = [None if value is None else to_device(value, device) for value in (inputs, rows, draft_map)]
    got = sample(logits.to(device), *moved)
    assert got.status.tolist() == expected.status.tolist(), f"seed {seed}, {cases}"
    assert got.token_ids.tolist() == expected.token_ids.tolist(), f"seed {seed}, {cases}"
