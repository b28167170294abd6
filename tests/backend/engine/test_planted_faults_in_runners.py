"""Faults planted between the engine and the real runners, over tiny models."""

import random
from dataclasses import replace

import numpy as np
import pytest

from kimi_backend.config.draft_config import DraftOverrides
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.plan_checks import PlanChecker
from kimi_backend.runners.sampled_rows import SampledRows
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.plan import DraftPlan, TargetPlan
from kimi_backend.types.request import GenerateRequest
from support.check_errors import RejectedDraftError, WrongTokensError
from support.engine_checks import check_all_accepted
from support.engine_runs import generate
from support.markov_models import markov_draft, markov_draft_config, markov_target
from support.random_requests import random_requests
from support.tiny_configs import target_config
from support.tiny_runners import OwnedRunner, draft_runner, target_runner

AUX_LAYER_IDS = (1, 2, 3)
TARGET = target_config(num_hidden_layers=3)
SETTINGS = SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=64)
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def target() -> OwnedRunner:
    return target_runner(TARGET, markov_target(TARGET), aux_layer_ids=AUX_LAYER_IDS)


@pytest.fixture(scope="module")
def draft() -> DraftRunner:
    """Its distribution is the target's."""
    config = markov_draft_config(TARGET, DraftOverrides(aux_layer_ids=AUX_LAYER_IDS))
    return draft_runner(config, markov_draft(config, markov_target(TARGET), 0.0)).runner


def requests(k: int) -> list[GenerateRequest]:
    drawn = random_requests(random.Random(8), 12, TARGET.vocab_size, longest_prompt=12, longest_output=14)
    return [
        replace(
            request,
            num_speculative_tokens=k,
            sampling=replace(request.sampling, allowed_token_ids=(), temperature=1.0, frequency_penalty=1.5),
        )
        for request in drawn
    ]


def check_tokens(target: OwnedRunner, draft: DraftRunner) -> None:
    plain = [outcome.token_ids for outcome in generate(target.runner, None, requests(0), SETTINGS)]
    fast = [outcome.token_ids for outcome in generate(target.runner, draft, requests(4), SETTINGS)]
    if plain != fast:
        raise WrongTokensError(f"{plain} without speculation, {fast} with it")


def check_acceptance(target: OwnedRunner, draft: DraftRunner) -> None:
    rounds = [r for outcome in generate(target.runner, draft, requests(4), SETTINGS) for r in outcome.rounds]
    assert len(rounds) > 10
    check_all_accepted(rounds)


def test_without_a_fault_both_checks_pass(target: OwnedRunner, draft: DraftRunner) -> None:
    check_tokens(target, draft)
    check_acceptance(target, draft)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_wrong_noise_index_in_the_target(
    monkeypatch: Patch, target: OwnedRunner, draft: DraftRunner, shift: int
) -> None:
    """Alone it is consistent with itself, so equal tokens do not show it: the draft's guesses do."""
    of = SampledRows.of

    def planted(plan: TargetPlan) -> SampledRows:
        rows = of(plan)
        return replace(rows, token_index=rows.token_index + shift)

    monkeypatch.setattr(SampledRows, "of", planted)
    check_tokens(target, draft)
    with pytest.raises(RejectedDraftError):
        check_acceptance(target, draft)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_wrong_noise_index_in_the_draft(
    monkeypatch: Patch, target: OwnedRunner, draft: DraftRunner, shift: int
) -> None:
    """The fault is behind the plan's checks, which refuse an index below the sequence's length."""
    check_draft = PlanChecker.check_draft

    def planted(self: PlanChecker, plan: DraftPlan, num_aux_rows: int) -> None:
        check_draft(self, plan, num_aux_rows)
        np.add(plan.output_index, shift, out=plan.output_index)

    monkeypatch.setattr(PlanChecker, "check_draft", planted)
    with pytest.raises(RejectedDraftError):
        check_acceptance(target, draft)


def test_penalties_without_the_windows_prefix(monkeypatch: Patch, target: OwnedRunner, draft: DraftRunner) -> None:
    of = SampledRows.of

    def planted(plan: TargetPlan) -> SampledRows:
        rows = of(plan)
        return replace(rows, window_len=np.zeros_like(rows.window_len))

    monkeypatch.setattr(SampledRows, "of", planted)
    with pytest.raises(WrongTokensError):
        check_tokens(target, draft)
