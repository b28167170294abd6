"""The engine over tiny real models: speculation on or off, any k, any draft, any batch gives the same tokens."""

import random
from dataclasses import replace

import pytest

from kimi_backend.config.draft_config import DraftOverrides
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.request import GenerateRequest
from support.engine_runs import generate
from support.markov_models import markov_draft, markov_draft_config, markov_target
from support.random_requests import random_requests
from support.tiny_configs import draft_config, target_config
from support.tiny_runners import OwnedRunner, draft_runner, target_runner

AUX_LAYER_IDS = (1, 2, 3)
AUX = DraftOverrides(aux_layer_ids=AUX_LAYER_IDS)
TARGET = target_config(num_hidden_layers=3)
EOS = {3}
MANY = SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def target() -> OwnedRunner:
    return target_runner(TARGET, markov_target(TARGET), aux_layer_ids=AUX_LAYER_IDS)


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    rng = random.Random(3)
    return random_requests(rng, 16, TARGET.vocab_size, longest_prompt=40, longest_output=16)


@pytest.fixture(scope="module")
def expected(target: OwnedRunner, requests: list[GenerateRequest]) -> list[list[int]]:
    """One request at a time, no speculation, no prefix cache."""
    settings = SchedulerSettings(max_num_seqs=1, max_num_batched_tokens=128, enable_prefix_cache=False)
    plain = [replace(request, num_speculative_tokens=0) for request in requests]
    return [outcome.token_ids for outcome in generate(target.runner, None, plain, settings, EOS)]


def make_draft(kind: str) -> DraftRunner:
    if kind == "good":
        config = markov_draft_config(TARGET, AUX, draft_vocab_size=48)
        return draft_runner(config, markov_draft(config, markov_target(TARGET), 0.1)).runner
    return draft_runner(draft_config(kind, TARGET, AUX)).runner


def tokens_with(
    target: OwnedRunner, draft: DraftRunner | None, requests: list[GenerateRequest], settings: SchedulerSettings, k: int
) -> list[list[int]]:
    changed = [replace(request, num_speculative_tokens=k) for request in requests]
    outcomes = generate(target.runner, draft, changed, settings, EOS)
    if draft is not None and k:
        assert any(outcome.rounds for outcome in outcomes)
    return [outcome.token_ids for outcome in outcomes]


@pytest.mark.parametrize("k", [1, 3, 4, 7])
def test_any_k(target: OwnedRunner, requests: list[GenerateRequest], expected: list[list[int]], k: int) -> None:
    assert tokens_with(target, make_draft("good"), requests, MANY, k) == expected


@pytest.mark.parametrize("kind", ["mla", "mla31", "mha"])
def test_any_draft(target: OwnedRunner, requests: list[GenerateRequest], expected: list[list[int]], kind: str) -> None:
    assert tokens_with(target, make_draft(kind), requests, MANY, 3) == expected


@pytest.mark.parametrize(("rows", "num_seqs"), [(8, 3), (23, 8), (128, 8)])
def test_any_batch_and_chunk(
    target: OwnedRunner,
    requests: list[GenerateRequest],
    expected: list[list[int]],
    rows: int,
    num_seqs: int,
) -> None:
    settings = SchedulerSettings(max_num_seqs=num_seqs, max_num_batched_tokens=rows)
    assert tokens_with(target, make_draft("good") if rows != 23 else None, requests, settings, 3) == expected


def test_a_draft_that_is_the_target_is_always_accepted(target: OwnedRunner, requests: list[GenerateRequest]) -> None:
    config = markov_draft_config(TARGET, AUX)
    draft = draft_runner(config, markov_draft(config, markov_target(TARGET), 0.0)).runner
    coupled = [
        replace(
            request,
            num_speculative_tokens=4,
            sampling=replace(request.sampling, allowed_token_ids=()),
        )
        for request in requests
    ]
    rounds = [r for outcome in generate(target.runner, draft, coupled, MANY, EOS) for r in outcome.rounds]
    assert len(rounds) > 20
    assert all(accepted == drafted for drafted, accepted in rounds), rounds
