"""A prompt's log-probabilities are a float64 forward's, whatever chunks, cached blocks, drafts and neighbours."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kimi_backend.config.draft_config import DraftOverrides
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.runners import prompt_scoring
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.request import EndCause, FinishReason, GenerateRequest, SamplingParams
from kimi_backend.types.scoring import TokenScores
from support.engine_runs import EngineHarness, Outcome, generate
from support.tiny_checkpoints import random_target
from support.tiny_configs import draft_config, target_json
from support.tiny_runners import OwnedRunner, draft_runner, target_runner
from support.transformers_target import transformers_model

JSON = target_json(num_hidden_layers=3)
TARGET = KimiModelConfig.from_hf_json(JSON)
TENSORS = random_target(TARGET, seed=3)
PROMPT = tuple(torch.randint(0, TARGET.vocab_size, (70,), generator=torch.Generator().manual_seed(5)).tolist())
NUM_TOP = 4
TOLERANCE = 2e-5
"""The rounding of float32 log-probabilities of some -5."""


@pytest.fixture(scope="module")
def target() -> OwnedRunner:
    return target_runner(TARGET, TENSORS, aux_layer_ids=(1, 2, 3))


@pytest.fixture(scope="module")
def draft() -> DraftRunner:
    return draft_runner(draft_config("mla", TARGET, DraftOverrides(aux_layer_ids=(1, 2, 3)))).runner


@pytest.fixture(scope="module")
def judge() -> torch.Tensor:
    """[tokens - 1, vocab_size] float64 log-probabilities of what follows each token."""
    with torch.inference_mode():
        model = transformers_model(JSON, TENSORS).double()
        return model(torch.tensor(PROMPT)[None]).logits[0, :-1].log_softmax(dim=-1)


def scored(name: str = "scored", prompt: tuple[int, ...] = PROMPT, k: int = 0, **fields: object) -> GenerateRequest:
    sampling = SamplingParams(seed=7, max_tokens=5, prompt_logprobs=NUM_TOP, ignore_eos=True)
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=replace(sampling, **fields),
        num_speculative_tokens=k,
    )


def scores_of(outcome: Outcome) -> TokenScores:
    """The scores that came with the first output, and with no other."""
    first, *others = outcome.steps
    assert first.prompt_scores is not None
    assert all(output.prompt_scores is None for output in others)
    return first.prompt_scores


def assert_judged(scores: TokenScores, judge: torch.Tensor) -> None:
    assert len(scores) == len(PROMPT) - 1
    own = judge.gather(1, torch.tensor(PROMPT[1:])[:, None])
    assert np.abs(scores.logprobs - own[:, 0].numpy()).max() < TOLERANCE
    assert np.array_equal(scores.ranks, (judge > own).sum(dim=1).numpy() + 1)
    best, ids = judge.topk(NUM_TOP)
    assert np.array_equal(scores.top_ids, ids.numpy())
    assert np.abs(scores.top_logprobs - best.numpy()).max() < TOLERANCE


@pytest.mark.parametrize("rows", [9, 33, 128])
@pytest.mark.parametrize("k", [0, 3])
def test_scores_are_a_float64_forwards_for_any_chunk_and_k(
    target: OwnedRunner, draft: DraftRunner, judge: torch.Tensor, rows: int, k: int
) -> None:
    settings = SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=rows)
    plain = scored("plain", PROMPT[:40], k, prompt_logprobs=None)
    asked = [plain, scored(k=k), scored("short", PROMPT[:2], k), scored("shortest", PROMPT[:1], k)]
    alone = generate(target.runner, draft, [scored(k=k, prompt_logprobs=None)], settings)[0]
    neighbour, whole, short, shortest = generate(target.runner, draft, asked, settings)
    assert_judged(scores_of(whole), judge)
    assert whole.token_ids == alone.token_ids
    assert all(output.prompt_scores is None for output in neighbour.steps)
    assert np.array_equal(scores_of(short).logprobs, scores_of(whole).logprobs[:1])
    assert len(scores_of(shortest)) == 0


def test_cached_rows_are_computed_again_and_found_by_those_who_come_after(
    target: OwnedRunner, draft: DraftRunner, judge: torch.Tensor
) -> None:
    settings = SchedulerSettings(max_num_seqs=2, max_num_batched_tokens=40)
    harness = EngineHarness(target.runner, draft, settings)
    outcomes = []
    for request in (scored("a", k=3, prompt_logprobs=None), scored("b", k=3), scored("c", k=3, prompt_logprobs=None)):
        outcomes.append(harness.add(request))
        harness.run()
    assert [outcome.sequence.num_cached_tokens for outcome in outcomes] == [0, 0, 64]
    assert_judged(scores_of(outcomes[1]), judge)
    assert len({tuple(outcome.token_ids) for outcome in outcomes}) == 1


def test_nothing_is_drawn_where_only_scores_are_wanted(target: OwnedRunner, judge: torch.Tensor) -> None:
    settings = SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=48)
    (outcome,) = generate(target.runner, None, [scored(max_tokens=0)], settings)
    assert (outcome.token_ids, outcome.finishes[0].reason) == ([], FinishReason.LENGTH)
    assert_judged(scores_of(outcome), judge)


def test_a_preempted_prompt_is_scored_once(target: OwnedRunner, judge: torch.Tensor) -> None:
    harness = EngineHarness(target.runner, None, SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=32))
    outcome = harness.add(scored())
    harness.step()
    harness.core.scheduler.preempt(outcome.sequence)
    harness.run()
    assert outcome.sequence.num_preemptions == 1
    assert_judged(scores_of(outcome), judge)


def test_few_rows_of_logits_stand_at_once(
    target: OwnedRunner, judge: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    compute = target.runner._model.compute_logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, len(hidden))
        return compute(hidden)

    monkeypatch.setattr(prompt_scoring, "SCORED_ROWS", 7)
    monkeypatch.setattr(target.runner._model, "compute_logits", watched)
    (outcome,) = generate(target.runner, None, [scored()], SchedulerSettings())
    assert_judged(scores_of(outcome), judge)
    assert most == 7


@pytest.mark.parametrize("max_tokens", [5, 0])
def test_a_prompt_whose_logits_are_not_finite_fails_alone(
    target: OwnedRunner, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = target.runner._model.compute_logits

    def spoilt(hidden: torch.Tensor) -> torch.Tensor:
        """One row of the long prompt's first slice."""
        logits = compute(hidden)
        if len(hidden) == prompt_scoring.SCORED_ROWS:
            logits[11, 3] = float("nan")
        return logits

    monkeypatch.setattr(target.runner._model, "compute_logits", spoilt)
    asked = [scored(max_tokens=max_tokens), scored("other", PROMPT[:5])]
    bad, other = generate(target.runner, None, asked, SchedulerSettings())
    assert (bad.finishes[0].reason, bad.finishes[0].cause) == (FinishReason.ERROR, EndCause.BAD_LOGITS)
    assert other.finishes[0].reason is FinishReason.LENGTH
    assert len(scores_of(other)) == 4
