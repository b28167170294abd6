"""A budget of thoughts ends them at its last token through the ordinary draw, whatever the draft guesses."""

import random
from dataclasses import replace
from functools import cache

import pytest

from kimi_backend.scheduler.sequence import MOST_UNREAD_TOKENS
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.request import GenerateRequest, SamplingParams, ThinkingBudget
from support.engine_runs import EngineHarness
from support.plain_decoding import decode_plainly
from support.random_requests import random_requests
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

VOCAB, MAX_LEN = 32, 128
EOS = frozenset({5})
SCRIPT = LogitScript(VOCAB)


def requests_with_budgets(num_requests: int) -> list[GenerateRequest]:
    """Budgets from no token to more than the reply has, beside requests without."""
    draw = random.Random(11)
    requests = []
    for request in random_requests(draw, num_requests, VOCAB, longest_prompt=12, longest_output=80):
        end = draw.choice([token for token in range(VOCAB) if token not in EOS])
        budget = ThinkingBudget(num_tokens=draw.choice((0, 1, 2, 5, 9, 14, 36, 45, 90)), end_token_id=end)
        sampling = replace(
            request.sampling,
            thinking_budget=budget if draw.random() < 0.8 else None,
            bad_words=(),
            min_tokens=0,
            **({"ignore_eos": True, "max_tokens": 100, "stop_token_ids": ()} if budget.num_tokens > 30 else {}),
        )
        requests.append(replace(request, sampling=sampling))
    return requests


def run(requests: list[GenerateRequest], *, overlaps: bool, num_blocks: int = 1600) -> list[list[int]]:
    sizes = {"block_size": 2, "max_model_len": MAX_LEN, "num_blocks": num_blocks}
    harness = EngineHarness(
        ScriptedTarget(describe("target", SCRIPT, **sizes), SCRIPT),
        ScriptedDraft(describe("draft", SCRIPT, **sizes), SCRIPT),
        SchedulerSettings(max_num_seqs=100, max_num_batched_tokens=200, async_scheduling=overlaps),
        EOS,
    )
    outcomes = [harness.add(request) for request in requests]
    harness.run()
    assert harness.core.scheduler.num_preemptions > 0 or num_blocks > 1000
    return [outcome.token_ids for outcome in outcomes]


REQUESTS = requests_with_budgets(40)


@cache
def expected() -> list[list[int]]:
    return decode_plainly(SCRIPT, REQUESTS, eos_token_ids=EOS, max_model_len=MAX_LEN)


def test_the_budgets_of_these_requests_are_used_up() -> None:
    forced_at = []
    for request, tokens in zip(REQUESTS, expected(), strict=True):
        budget = request.sampling.thinking_budget
        if budget is not None and len(tokens) > budget.num_tokens:
            assert budget.end_token_id in tokens[: budget.num_tokens + 1]
            if tokens.index(budget.end_token_id) == budget.num_tokens and len(tokens) > budget.num_tokens + 1:
                forced_at.append(budget.num_tokens)
    assert len(forced_at) > 15, "and content follows"
    assert max(forced_at) > MOST_UNREAD_TOKENS, "steps overlapped before"


@pytest.mark.parametrize(("k", "overlaps"), [(0, True), (1, True), (4, True), (7, True), (3, False)])
def test_the_tokens_are_those_of_plain_decoding_at_any_k(k: int, overlaps: bool) -> None:
    assert run([replace(request, num_speculative_tokens=k) for request in REQUESTS], overlaps=overlaps) == expected()


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_sequence_that_is_preempted_keeps_its_budget(overlaps: bool) -> None:
    assert run(REQUESTS, overlaps=overlaps, num_blocks=260) == expected()


@pytest.mark.parametrize("k", [0, 3])
def test_steps_that_were_launched_ahead_give_way_in_time(k: int) -> None:
    """Alone, and with nothing else that the host must look at, a sequence's steps overlap until its budget comes
    near."""
    draw = random.Random(5)
    for num_tokens in range(30, 44):
        sampling = SamplingParams(
            temperature=draw.choice((0.0, 1.0)),
            seed=draw.randrange(2**64),
            max_tokens=60,
            ignore_eos=True,
            thinking_budget=ThinkingBudget(num_tokens, draw.randrange(VOCAB)),
        )
        request = GenerateRequest(
            request_id=f"r{num_tokens}",
            prompt_token_ids=tuple(draw.randrange(VOCAB) for _ in range(5)),
            sampling=sampling,
            num_speculative_tokens=k,
        )
        expected = decode_plainly(SCRIPT, [request], eos_token_ids=EOS, max_model_len=MAX_LEN)
        assert run([request], overlaps=True) == expected
