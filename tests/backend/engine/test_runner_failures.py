"""Runners that restart, die, answer nonsense or NaN: what a request still gets."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kimi_backend.errors import ModelUnavailableError
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.plan import DraftPlan, DraftReply, TargetPlan, TargetReply
from kimi_backend.types.request import EndCause, FinishReason, GenerateRequest, SamplingParams
from support.engine_runs import EngineHarness
from support.plain_decoding import decode_plainly
from support.random_requests import random_requests
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

VOCAB = 48
SCRIPT = LogitScript(VOCAB)


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    return [replace(r, num_speculative_tokens=3) for r in random_requests(random.Random(2), 40, VOCAB)]


@pytest.fixture(scope="module")
def expected(requests: list[GenerateRequest]) -> list[list[int]]:
    return decode_plainly(SCRIPT, requests, eos_token_ids=frozenset(), max_model_len=128)


class Pair:
    """A harness over both models, with every request added."""

    def __init__(self, requests: list[GenerateRequest], draft: ScriptedDraft | None = None) -> None:
        self.target = ScriptedTarget(describe("target", SCRIPT, num_blocks=400), SCRIPT)
        self.draft = draft or ScriptedDraft(describe("draft", SCRIPT, num_blocks=400), SCRIPT)
        self.harness = EngineHarness(self.target, self.draft, SchedulerSettings(max_num_seqs=20))
        self.outcomes = [self.harness.add(request) for request in requests]

    @property
    def token_ids(self) -> list[list[int]]:
        return [outcome.token_ids for outcome in self.outcomes]


@pytest.mark.parametrize("at_step", [1, 4, 9])
def test_a_restarted_target_costs_time_and_nothing_else(
    at_step: int, requests: list[GenerateRequest], expected: list[list[int]]
) -> None:
    pair = Pair(requests)

    def restart(step: int) -> None:
        if step == at_step:
            pair.target.restart(num_blocks=300)

    pair.harness.run(each_step=restart)
    assert pair.token_ids == expected
    assert pair.harness.core.kv.target_pool.num_blocks == 300
    assert sum(o.sequence.num_preemptions for o in pair.outcomes) > 0


@pytest.mark.parametrize("at_step", [1, 4, 9])
def test_a_restarted_draft_resumes_speculation(
    at_step: int, requests: list[GenerateRequest], expected: list[list[int]]
) -> None:
    pair = Pair(requests)

    def restart(step: int) -> None:
        if step == at_step:
            pair.draft.restart(num_blocks=500)

    pair.harness.run(each_step=restart)
    assert pair.token_ids == expected
    assert pair.harness.core.scheduler.is_drafting
    assert pair.harness.core.kv.draft_pool is not None
    assert pair.harness.core.kv.draft_pool.num_blocks == 500


def test_a_dead_draft_turns_speculation_off_and_fails_nobody(
    requests: list[GenerateRequest], expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(requests)
    late = []

    def die(step: int) -> None:
        if step == 5:
            pair.draft.unavailable = True
            late.extend(pair.harness.core.scheduler.waiting.snapshot())

    pair.harness.run(each_step=die)
    assert pair.token_ids == expected
    assert not pair.harness.core.scheduler.is_drafting
    assert any("speculation is off" in record.message for record in caplog.records)
    drafted_late = [s.num_draft_tokens for o in pair.outcomes if o.sequence in late for s in o.steps]
    assert late and sum(drafted_late) == 0


def test_a_draft_whose_process_died_is_noticed_though_nobody_calls_it(requests: list[GenerateRequest]) -> None:
    description = replace(describe("draft", SCRIPT, num_blocks=400), process_id=7)
    draft = ScriptedDraft(description, SCRIPT)
    pair = Pair([replace(request, num_speculative_tokens=0) for request in requests[:3]], draft)
    link = pair.harness.core.runners.draft
    assert link is not None
    spoken = []

    def die(step: int) -> None:
        if step == 2:
            link.report_death(6)  # an earlier one's
        if step == 4:
            assert pair.harness.core.scheduler.is_drafting
            draft.unavailable = True
            link.report_death(7)
        if step == 5:
            spoken.append(pair.harness.core.scheduler.is_drafting)
            draft.unavailable = False
            draft.description = replace(description, process_id=8, runner_epoch=description.runner_epoch + 1)
            pair.harness.clock.now += 10

    pair.harness.run(each_step=die)
    assert spoken == [False]
    assert pair.harness.core.scheduler.is_drafting, "another process serves the draft by now"


def test_speculation_returns_with_the_draft(requests: list[GenerateRequest], expected: list[list[int]]) -> None:
    pair = Pair(requests)

    def blink(step: int) -> None:
        pair.draft.unavailable = 3 <= step < 8
        pair.harness.clock.now += 0.2

    pair.harness.run(each_step=blink)
    assert pair.token_ids == expected
    assert pair.harness.core.scheduler.is_drafting
    assert sum(o.sequence.num_preemptions for o in pair.outcomes) > 0
    assert any(o.rounds for o in pair.outcomes[-10:])


class NonsenseDraft(ScriptedDraft):
    """A draft that from step 4 on proposes an id that is no token, or raises what no runner should."""

    nonsense: int | None = VOCAB

    def propose(self, plan: DraftPlan) -> DraftReply:
        reply = super().propose(plan)
        if self.num_steps < 4:
            return reply
        if self.nonsense is None:
            raise KeyError("a bug in the runner")
        assert reply.draft_token_ids is not None
        wrong = reply.draft_token_ids.copy()
        wrong[:, 0] = self.nonsense
        return replace(reply, draft_token_ids=wrong)


@pytest.mark.parametrize("nonsense", [VOCAB, -1, None])
def test_a_draft_that_answers_nonsense_fails_nobody(
    nonsense: int | None, requests: list[GenerateRequest], expected: list[list[int]]
) -> None:
    draft = NonsenseDraft(describe("draft", SCRIPT, num_blocks=400), SCRIPT, in_table=False)
    draft.nonsense = nonsense
    pair = Pair(requests, draft)
    pair.harness.run()
    assert pair.token_ids == expected
    assert not pair.harness.core.scheduler.is_drafting


def test_a_draft_of_another_kind_stays_out(requests: list[GenerateRequest], expected: list[list[int]]) -> None:
    pair = Pair(requests)

    def swap(step: int) -> None:
        if step == 3:
            pair.draft.restart()
            pair.draft.description = replace(pair.draft.description, hidden_size=1)
        pair.harness.clock.now += 1.0

    pair.harness.run(each_step=swap)
    assert pair.token_ids == expected
    assert not pair.harness.core.scheduler.is_drafting


def test_a_target_of_another_kind_is_waited_out(requests: list[GenerateRequest], expected: list[list[int]]) -> None:
    """It is refused, with the reason, until the one that left is there again."""
    pair = Pair(requests)
    pair.harness.step()
    kind = pair.target.description
    pair.target.restart()
    pair.target.description = replace(pair.target.description, vocab_size=VOCAB + 1)
    for _ in range(3):
        pair.harness.step()
        pair.harness.clock.now += 1.0
    link = pair.harness.core.runners.target
    assert not link.is_up
    assert f"vocab_size: {VOCAB} before, {VOCAB + 1} now" in link.problem
    pair.target.description = replace(pair.target.description, vocab_size=kind.vocab_size)
    pair.harness.run(each_step=lambda _: setattr(pair.harness.clock, "now", pair.harness.clock.now + 1.0))
    assert pair.token_ids == expected


def test_one_failed_target_step_is_repeated(requests: list[GenerateRequest], expected: list[list[int]]) -> None:
    pair = Pair(requests)
    pair.target.fail_at_steps = {3, 6, 7}
    pair.harness.run()
    assert pair.token_ids == expected


def test_requests_whose_steps_keep_failing_are_given_up(requests: list[GenerateRequest]) -> None:
    pair = Pair(requests)
    pair.target.fail_at_steps = {2, 3, 4}
    pair.harness.run()
    failed = [o for o in pair.outcomes if o.finishes[0].reason is FinishReason.ERROR]
    assert 0 < len(failed) < len(requests)
    assert failed[0].finishes[0].error == "3 target steps in a row failed: scripted failure"


class Unanswered:
    """A step whose runner dies before it replies."""

    def wait(self) -> TargetReply:
        raise ModelUnavailableError("no reply")


class DyingTarget(ScriptedTarget):
    """Takes some steps and never replies to them."""

    dies_in: frozenset[int] = frozenset()

    def launch(self, plan: TargetPlan) -> Any:
        pending = super().launch(plan)
        if self.num_steps not in self.dies_in:
            return pending
        self._in_flight = []
        return Unanswered()


@pytest.mark.parametrize(("dies_in", "num_failing"), [((3, 6, 7), 0), ((2, 3, 4), 3)])
def test_a_step_that_was_taken_and_not_answered_is_repeated_too(
    dies_in: tuple[int, ...], num_failing: int, requests: list[GenerateRequest], expected: list[list[int]]
) -> None:
    target = DyingTarget(describe("target", SCRIPT, num_blocks=400), SCRIPT)
    target.dies_in = frozenset(dies_in)
    harness = EngineHarness(target, None, SchedulerSettings(max_num_seqs=20))
    outcomes = [harness.add(request) for request in requests]
    harness.run()
    for outcome, token_ids in zip(outcomes, expected, strict=True):
        if outcome.finishes[0].reason is FinishReason.ERROR:
            assert outcome.finishes[0].error == f"{num_failing} target steps in a row failed: no reply"
        else:
            assert outcome.token_ids == token_ids
    assert any(outcome.finishes[0].reason is FinishReason.ERROR for outcome in outcomes) is bool(num_failing)


def test_a_row_that_is_not_finite_fails_its_sequence_alone() -> None:
    poison = 7
    script = LogitScript(VOCAB, nan_token_id=poison)
    requests = [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=(i, i + 1, 3),
            sampling=SamplingParams(seed=i, max_tokens=24, temperature=1.5),
            num_speculative_tokens=i % 4,
        )
        for i in range(40)
    ]
    expected = decode_plainly(SCRIPT, requests, eos_token_ids=frozenset({poison}), max_model_len=128)
    target = ScriptedTarget(describe("target", script, num_blocks=1000), script)
    draft = ScriptedDraft(describe("draft", SCRIPT, num_blocks=1000), SCRIPT)
    harness = EngineHarness(target, draft)
    outcomes = [harness.add(request) for request in requests]
    harness.run()
    num_failed = 0
    for outcome, tokens in zip(outcomes, expected, strict=True):
        # The token after the poison cannot be drawn, unless the poison was the last token anyway.
        assert outcome.token_ids == tokens
        if tokens[-1] == poison and len(tokens) < 24:
            assert outcome.finishes[0].reason is FinishReason.ERROR
            assert "not finite" in (outcome.finishes[0].error or "")
            num_failed += 1
        else:
            assert outcome.finishes[0].reason is FinishReason.LENGTH
    assert 3 < num_failed < 37
    assert harness.core.kv.target_pool.num_held == 0


def test_kv_of_a_failed_sequence_is_not_reused() -> None:
    script = LogitScript(VOCAB, nan_token_id=9)
    target = ScriptedTarget(describe("target", script), script)
    harness = EngineHarness(target, None, SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=8))
    prompt = (*range(10, 40), 9)
    for expected in (0, 0):
        outcome = harness.add(GenerateRequest(request_id="r", prompt_token_ids=prompt))
        harness.run()
        assert outcome.finishes[0].reason is FinishReason.ERROR
        assert outcome.sequence.num_cached_tokens == expected


def test_a_request_that_may_draw_nothing_fails_alone() -> None:
    nothing = GenerateRequest(
        request_id="nothing",
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(seed=1, allowed_token_ids=(4,), bad_words=((4,),), max_tokens=5),
    )
    good = GenerateRequest(request_id="good", prompt_token_ids=(1, 2), sampling=SamplingParams(seed=1, max_tokens=5))
    pair = Pair([nothing, good])
    pair.harness.run()
    assert pair.outcomes[0].finishes[0].reason is FinishReason.ERROR
    assert pair.outcomes[0].finishes[0].cause is EndCause.NO_TOKEN_LEFT
    error = pair.outcomes[0].finishes[0].error
    assert error == "allowed_token_ids, bad_words: no token is left to draw as output token 1"
    assert pair.outcomes[1].finishes[0].reason is FinishReason.LENGTH


@pytest.mark.parametrize("k", [0, 3])
def test_a_request_that_bans_itself_takes_no_prefix_from_the_others(k: int) -> None:
    """Its KV and the draft's are as good as anybody's."""
    prompt = tuple(range(10, 43))
    banned = SamplingParams(seed=1, allowed_token_ids=(4,), bad_words=((4, 4, 4),), max_tokens=20, temperature=1.0)
    requests = [
        GenerateRequest(request_id="0", prompt_token_ids=prompt, sampling=SamplingParams(seed=1, max_tokens=2)),
        GenerateRequest(request_id="1", prompt_token_ids=prompt, sampling=banned, num_speculative_tokens=k),
        GenerateRequest(request_id="2", prompt_token_ids=prompt, sampling=SamplingParams(seed=1, max_tokens=2)),
    ]
    target, draft = ScriptedTarget(describe("target", SCRIPT), SCRIPT), ScriptedDraft(describe("draft", SCRIPT), SCRIPT)
    harness = EngineHarness(target, draft)
    outcomes = []
    for request in requests:
        outcomes.append(harness.add(request))
        harness.run()
    assert outcomes[1].token_ids == [4, 4]
    assert outcomes[1].finishes[0].cause is EndCause.NO_TOKEN_LEFT
    cached = [outcome.sequence.num_cached_tokens for outcome in outcomes]
    assert cached[0] == 0
    assert cached[1] == cached[2] > 0


def test_a_draft_row_that_is_not_finite_only_ends_that_requests_speculation(
    requests: list[GenerateRequest], expected: list[list[int]]
) -> None:
    pair = Pair(requests)
    pair.draft.nan_token_id = 11
    pair.harness.run()
    assert pair.token_ids == expected
    assert pair.harness.core.scheduler.is_drafting
    wants = {o.sequence.wants_draft for o in pair.outcomes}
    assert wants == {True, False}


def test_replies_to_another_step_are_a_bug() -> None:
    pair = Pair([GenerateRequest(request_id="r", prompt_token_ids=(1,))])
    verify = pair.target._verify
    pair.target._verify = lambda plan: replace(verify(plan), step_id=99)  # type: ignore[method-assign]
    with pytest.raises(Exception, match="target replied to step 99, 1 was asked"):
        pair.harness.step()


def test_np_arrays_in_plans_are_small_integers() -> None:
    """Block tables are int32, slots int64: ids above 65,535 survive."""
    target = ScriptedTarget(describe("target", SCRIPT, num_blocks=70_000), SCRIPT)
    harness = EngineHarness(target, None)
    held = harness.core.kv.target_pool.allocate(69_900)
    outcome = harness.add(
        GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(seed=1, max_tokens=20))
    )
    harness.run()
    assert max(held) < 69_900
    table = harness.core.scheduler.table.target_blocks
    assert table.dtype == np.int32
    assert table.max() >= 65_536
    assert outcome.finishes[0].reason is FinishReason.LENGTH
