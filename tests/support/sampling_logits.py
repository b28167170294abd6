"""Logits with ties and values that are not finite, masks, vocabulary maps; and kernels against the reference."""

import random
from collections.abc import Callable

import torch

from kimi_kernels.sampling import reference
from kimi_kernels.sampling_inputs import SampleOutput, VocabularyMap
from support.sampling_cases import random_case, sampling_tensors


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
    words = [[rng.randrange(-(2**31), 2**31) for _ in range((vocab_size + 31) // 32)] for _ in range(num_rows)]
    return torch.tensor(words, dtype=torch.int32)


def vocabulary_map(columns: list[int], vocab_size: int) -> VocabularyMap:
    column_of_token_id = torch.full((vocab_size,), -1, dtype=torch.int64)
    column_of_token_id[torch.tensor(columns)] = torch.arange(len(columns))
    return VocabularyMap(token_id_of_column=torch.tensor(columns), column_of_token_id=column_of_token_id)


def to_device(value: object, device: str) -> object:
    """A dataclass of tensors on another device."""
    fields = {name: getattr(value, name) for name in value.__dataclass_fields__}  # type: ignore[attr-defined]
    return type(value)(**{name: None if field is None else field.to(device) for name, field in fields.items()})


def assert_draws_as_reference(
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
    expected = reference.sample_tokens(logits, inputs, rows, draft_map)
    moved = [None if value is None else to_device(value, device) for value in (inputs, rows, draft_map)]
    got = sample(logits.to(device), *moved)
    assert got.status.tolist() == expected.status.tolist(), f"seed {seed}, {cases}"
    assert got.token_ids.tolist() == expected.token_ids.tolist(), f"seed {seed}, {cases}"
