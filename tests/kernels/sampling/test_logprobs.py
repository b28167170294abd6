"""Log-probabilities are those of the raw logits, whatever the processors did to the draw."""

import pytest
import torch

from kimi_kernels.sampling.logprobs import most_likely
from kimi_kernels.sampling.plain import sample_tokens
from kimi_kernels.sampling_inputs import VocabularyMap
from support.sampling_cases import SequenceCase, sampling_tensors

CASES = [SequenceCase(temperature=0.5, top_k=2, bias={3: 5.0}, seed=1), SequenceCase(temperature=0.0, bans={1: 99})]


def test_drawn_and_top_of_raw_logits() -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    inputs, rows = sampling_tensors(CASES)
    result = sample_tokens(logits, inputs, rows, num_logprobs=4)
    exact = logits.double().log_softmax(dim=1)
    assert result.logprobs is not None and result.top_logprobs is not None and result.top_logprob_ids is not None
    assert torch.equal(result.logprobs, exact.gather(1, result.token_ids[:, None])[:, 0].float())
    values, ids = exact.sort(dim=1, descending=True)
    assert torch.equal(result.top_logprob_ids, ids[:, :4])
    assert torch.equal(result.top_logprobs, values[:, :4].float())


def test_asking_for_none_gives_none_and_asking_for_zero_gives_the_drawn() -> None:
    logits = torch.zeros(2, 9)
    inputs, rows = sampling_tensors(CASES)
    assert sample_tokens(logits, inputs, rows).logprobs is None
    zero = sample_tokens(logits, inputs, rows, num_logprobs=0)
    assert zero.logprobs is not None and zero.top_logprobs is not None
    assert zero.top_logprobs.shape == (2, 0)


def test_equals_list_the_lowest_target_id_first() -> None:
    inputs, rows = sampling_tensors([SequenceCase()])
    token_id_of_column = torch.tensor([7, 2, 5, 0])
    column_of_token_id = torch.full((8,), -1, dtype=torch.int64)
    column_of_token_id[token_id_of_column] = torch.arange(4)
    draft_map = VocabularyMap(token_id_of_column=token_id_of_column, column_of_token_id=column_of_token_id)
    result = sample_tokens(torch.tensor([[1.0, 3.0, 3.0, 1.0]]), inputs, rows, draft_map, num_logprobs=4)
    assert result.top_logprob_ids is not None
    assert result.top_logprob_ids.tolist() == [[2, 5, 0, 7]]


@pytest.mark.parametrize("count", [0, 1, 20, 97])
def test_the_most_likely_are_those_of_a_stable_sort(count: int) -> None:
    random = torch.Generator().manual_seed(0)
    few_values = torch.randint(-3, 4, (50, 97), generator=random).float() / 2
    few_values[0, 5] = -0.0
    few_values[1] = float("-inf")
    tiny = torch.randn(5, 97, generator=random) * 1e-42
    raw = torch.cat([few_values, tiny, 1e30 * torch.randn(5, 97, generator=random)])
    expected = raw.sort(dim=1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(most_likely(raw, count), expected)


def test_more_than_there_are_is_refused() -> None:
    inputs, rows = sampling_tensors([SequenceCase()])
    with pytest.raises(ValueError, match="num_logprobs is 10; must be from 0 to the 9 columns"):
        sample_tokens(torch.zeros(1, 9), inputs, rows, num_logprobs=10)
