"""Draws follow the processed distribution, computed here in float64 without the package."""

import itertools
import math

import pytest
import torch

from kimi_kernels.sampling.plain import sample_tokens
from kimi_kernels.sampling_inputs import SamplingRows
from support.sampling_cases import SequenceCase, sampling_tensors

NUM_DRAWS = 20_000
VOCAB_SIZE = 40


def draws(logits: torch.Tensor, case: SequenceCase) -> torch.Tensor:
    """Token ids of NUM_DRAWS rows of one sequence at different token indices."""
    inputs, rows = sampling_tensors([case])
    many = SamplingRows(
        sequence=torch.zeros(NUM_DRAWS, dtype=torch.int64),
        token_index=torch.arange(NUM_DRAWS),
        window_token_ids=rows.window_token_ids,
        window_len=torch.zeros(NUM_DRAWS, dtype=torch.int32),
    )
    result = sample_tokens(logits.expand(NUM_DRAWS, -1), inputs, many)
    assert not result.status.any()
    return result.token_ids


def target_probabilities(logits: torch.Tensor, case: SequenceCase) -> torch.Tensor:
    l = logits.double().clone()  # noqa: E741
    for token in set(case.prompt + case.output) if case.uses_penalty else ():
        l[token] = l[token] / case.repetition_penalty if l[token] > 0 else l[token] * case.repetition_penalty
        count = case.output.count(token)
        l[token] -= case.frequency_penalty * count + (case.presence_penalty if count else 0.0)
    for token, value in case.bias.items():
        l[token] += value
    l[list(case.bans)] = -math.inf
    p = (l / case.temperature).softmax(0)
    p[p < case.min_p * p.max()] = 0
    if case.top_k:
        p[p < p.sort(descending=True).values[case.top_k - 1]] = 0
    p /= p.sum()
    above = torch.tensor([p[p > value].sum() for value in p])
    p[above >= case.top_p] = 0
    return p / p.sum()


def assert_follows(token_ids: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Pearson's chi-square, cells expected fewer than five times joined; five standard deviations of the statistic."""
    observed = torch.bincount(token_ids, minlength=VOCAB_SIZE).double()
    expected = probabilities * token_ids.numel()
    assert (observed[expected == 0] == 0).all()
    is_rare = expected < 5
    cells = [(observed[~is_rare], expected[~is_rare])]
    if expected[is_rare].sum() >= 5:
        cells.append((observed[is_rare].sum()[None], expected[is_rare].sum()[None]))
    statistic = sum(((o - e) ** 2 / e).sum().item() for o, e in cells)
    freedom = sum(o.numel() for o, _ in cells) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5, "the draws do not follow the distribution"


LOGITS = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(11)) * 2
PROCESSORS = {
    "penalties": {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.3,
        "prompt": [1, 2, 3],
        "output": [3, 4, 4, 5],
    },
    "bias": {"bias": {0: 2.0, 7: -1.5}},
    "bans": {"bans": {6: 10**6, 8: 10**6}},
    "min_p": {"min_p": 0.03},
    "top_k": {"top_k": 15},
    "top_p": {"top_p": 0.85},
}


@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.8])
def test_temperature(temperature: float) -> None:
    case = SequenceCase(temperature=temperature, seed=5)
    assert_follows(draws(LOGITS, case), target_probabilities(LOGITS, case))


@pytest.mark.parametrize(
    "names",
    [names for size in (1, 2, 5, 6) for names in itertools.combinations(PROCESSORS, size)],
    ids="+".join,
)
def test_processors_alone_in_pairs_and_together(names: tuple[str, ...]) -> None:
    settings = {key: value for name in names for key, value in PROCESSORS[name].items()}
    case = SequenceCase(temperature=1.3, seed=sum(map(len, names)), **settings)
    assert_follows(draws(LOGITS, case), target_probabilities(LOGITS, case))


def test_a_wrong_distribution_would_be_seen() -> None:
    case = SequenceCase(temperature=1.0, seed=5)
    with pytest.raises(AssertionError, match="do not follow the distribution"):
        assert_follows(draws(LOGITS, case), target_probabilities(LOGITS, SequenceCase(temperature=1.05)))
