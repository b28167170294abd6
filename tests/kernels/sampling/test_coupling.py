"""A draft whose distribution is the target's draws the target's tokens, at every setting."""

import random

import pytest
import torch

from kimi_kernels.sampling.plain import sample_tokens
from kimi_kernels.sampling_inputs import VocabularyMap
from support.sampling_cases import random_case, sampling_tensors

VOCAB_SIZE = 60


def permuted(seed: int, vocab_size: int = VOCAB_SIZE) -> VocabularyMap:
    token_id_of_column = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    return VocabularyMap(token_id_of_column=token_id_of_column, column_of_token_id=token_id_of_column.argsort())


@pytest.mark.parametrize("seed", range(40))
def test_permuted_vocabulary_draws_the_same(seed: int) -> None:
    rng = random.Random(seed)
    cases = [random_case(rng, VOCAB_SIZE, num_window=4) for _ in range(6)]
    inputs, rows = sampling_tensors(cases)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows.sequence.numel(), VOCAB_SIZE, generator=generator) * 3
    if seed % 2:
        logits = logits.round()  # ties
    target = sample_tokens(logits, inputs, rows)
    vocabulary_map = permuted(seed)
    draft = sample_tokens(logits[:, vocabulary_map.token_id_of_column], inputs, rows, vocabulary_map)
    assert torch.equal(target.token_ids, draft.token_ids)
    assert torch.equal(target.status, draft.status)


def test_smaller_vocabulary_draws_among_its_tokens() -> None:
    """Tokens that the draft lacks are banned for it; the noise of the others does not move."""
    columns = torch.tensor([50, 3, 17, 8, 33])
    column_of_token_id = torch.full((VOCAB_SIZE,), -1, dtype=torch.int64)
    column_of_token_id[columns] = torch.arange(5)
    rng = random.Random(9)
    cases = [random_case(rng, VOCAB_SIZE, num_window=2) for _ in range(20)]
    inputs, rows = sampling_tensors(cases)
    logits = torch.randn(rows.sequence.numel(), 5, generator=torch.Generator().manual_seed(2))
    draft = sample_tokens(
        logits, inputs, rows, VocabularyMap(token_id_of_column=columns, column_of_token_id=column_of_token_id)
    )
    full = torch.full((rows.sequence.numel(), VOCAB_SIZE), float("-inf"))
    full[:, columns] = logits
    target = sample_tokens(full, inputs, rows)
    assert torch.equal(draft.token_ids, target.token_ids)
    assert torch.equal(draft.status, target.status)
