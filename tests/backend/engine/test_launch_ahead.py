"""A verify launched before the host has the draft's tokens: tokens, rounds and pools as of one that waits for them."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from kimi_backend.engine.unread_draft import UnreadDraft
from kimi_backend.errors import KimiError
from kimi_backend.scheduler.plan_builder import DraftWork
from kimi_backend.scheduler.sequence import Finish
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.spec_decode.policy import FixedPolicy
from kimi_backend.spec_decode.protocols import OnQueued
from kimi_backend.types.plan import TargetPlan, TargetReply, TokenHandle
from kimi_backend.types.request import DraftSampling, EndCause, FinishReason, GenerateRequest
from support.engine_runs import EngineHarness
from support.plain_decoding import decode_plainly
from support.random_requests import random_requests
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

VOCAB = 48
SCRIPT = LogitScript(VOCAB)
EOS = frozenset({5})
REQUESTS = random_requests(random.Random(4), 120, VOCAB, longest_prompt=16, longest_output=22)


def plain(request: GenerateRequest) -> GenerateRequest:
    """Without what makes a draft wait for its verify, and without a choice that learns from one round more or less."""
    sampling = replace(
        request.sampling,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        logit_bias={},
        bad_words=(),
        allowed_token_ids=(),
        min_tokens=0,
    )
    is_greedy = request.draft_sampling is DraftSampling.GREEDY
    choice = DraftSampling.GREEDY if is_greedy else DraftSampling.COUPLED
    return replace(request, sampling=sampling, draft_sampling=choice)


PLAIN = [plain(request) for request in REQUESTS]


def expected_texts(requests: list[GenerateRequest]) -> list[list[int]]:
    return decode_plainly(SCRIPT, requests, eos_token_ids=EOS, max_model_len=128)


EXPECTED = {id(requests): expected_texts(requests) for requests in (REQUESTS, PLAIN)}
BOTH = pytest.mark.parametrize("requests", [REQUESTS, PLAIN], ids=["processed", "plain"])


class CountingTarget(ScriptedTarget):
    """Counts the verifies that read tokens which the draft left."""

    queues = False  # so that every step holds the same blocks; test_steps_ahead.py is about the others
    num_read = 0

    def _verify(self, plan: TargetPlan) -> TargetReply:
        self.num_read += plan.draft_tokens.num_seqs > 0
        return super()._verify(plan)


def harness(
    *,
    launch_ahead: bool = True,
    requests: list[GenerateRequest] = REQUESTS,
    num_blocks: int = 4000,
    block_size: int = 4,
    nan_token_id: int | None = None,
    **settings: object,
) -> EngineHarness:
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    draft = ScriptedDraft(describe("draft", SCRIPT, **sizes), SCRIPT)
    draft.nan_token_id = nan_token_id
    made = EngineHarness(
        CountingTarget(describe("target", SCRIPT, **sizes), SCRIPT),
        draft,
        SchedulerSettings(launch_ahead=launch_ahead, **settings),  # type: ignore[arg-type]
        EOS,
    )
    for request in requests:
        made.add(request)
    return made


def traced(one: EngineHarness) -> list[tuple[int, ...]]:
    """Run to the end; after every step, who runs and waits, and how many blocks are held."""
    trace: list[tuple[int, ...]] = []

    def look(_: int) -> None:
        kv, scheduler = one.core.kv, one.core.scheduler
        assert kv.draft_pool is not None
        trace.append((len(scheduler.running), len(scheduler.waiting), kv.target_pool.num_held, kv.draft_pool.num_held))

    one.run(each_step=look)
    return trace


def rounds(one: EngineHarness) -> list[list[tuple[int, int]]]:
    return [outcome.rounds for outcome in one.outcomes]


def texts(one: EngineHarness) -> list[list[int]]:
    return [outcome.token_ids for outcome in one.outcomes]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 200},
        {"max_num_seqs": 30, "max_num_batched_tokens": 60},
        {"max_num_seqs": 60, "num_blocks": 90, "block_size": 2},
        {"max_num_seqs": 7, "max_num_batched_tokens": 7},
    ],
)
@BOTH
def test_the_same_steps_as_in_lockstep(settings: dict[str, object], requests: list[GenerateRequest]) -> None:
    """Chunks, k of 0 to 7 side by side, penalties and preemptions among them: every step holds the same blocks."""
    lockstep, ahead = (
        harness(launch_ahead=launch_ahead, requests=requests, enable_prefix_cache=False, **settings)  # type: ignore[arg-type]
        for launch_ahead in (False, True)
    )
    assert traced(ahead) == traced(lockstep)
    assert rounds(ahead) == rounds(lockstep)
    assert texts(ahead) == texts(lockstep) == EXPECTED[id(requests)]
    assert ahead.core._target.num_read > 5  # type: ignore[attr-defined]
    assert ahead.core._draft.num_followed > (5 if requests is PLAIN else -1)  # type: ignore[union-attr]
    assert lockstep.core._draft.num_followed == 0  # type: ignore[union-attr]
    assert lockstep.core._target.num_read == 0  # type: ignore[attr-defined]
    if "num_blocks" in settings:
        assert ahead.core.scheduler.num_preemptions > 0


@BOTH
def test_what_the_draft_fails_to_propose_counts_as_in_lockstep(requests: list[GenerateRequest]) -> None:
    """No round for its placeholders, though they took rows; no draft for that request afterwards."""
    lockstep, ahead = (
        harness(launch_ahead=launch_ahead, requests=requests, nan_token_id=7, max_num_seqs=200)
        for launch_ahead in (False, True)
    )
    for one in (lockstep, ahead):
        one.run()
    assert texts(ahead) == texts(lockstep) == EXPECTED[id(requests)]
    assert rounds(ahead) == rounds(lockstep)
    stopped = [o.sequence.wants_draft for o in ahead.outcomes]
    assert stopped == [o.sequence.wants_draft for o in lockstep.outcomes]
    assert not all(stopped)
    assert ahead.core.kv.draft_pool is not None and ahead.core.kv.draft_pool.num_held == 0


def test_a_failed_draft_publishes_nothing() -> None:
    """Its blocks are offered to others only when a verify has told that they are good."""
    request = replace(REQUESTS[0], prompt_token_ids=tuple(range(8, 28)), num_speculative_tokens=3)
    one = harness(requests=[request], block_size=1)
    published: list[int] = []
    one.core.kv.prefix_cache.publish_draft = lambda key, block: published.append(block)  # type: ignore[method-assign]
    one.step()
    assert one.core._unread is not None
    assert published == [], "published before anybody knows them"
    one.step()
    assert len(published) >= 20


@pytest.mark.parametrize("at_step", [1, 2, 5, 9])
@BOTH
def test_sequences_cancelled_between_draft_and_verify(at_step: int, requests: list[GenerateRequest]) -> None:
    one = harness(max_num_seqs=40, num_blocks=300, requests=requests)

    def cancel(step: int) -> None:
        if step == at_step:
            for sequence in one.core.scheduler.running[::3]:
                assert one.core.end(sequence, Finish(FinishReason.CANCELLED, cause=EndCause.CLIENT))

    one.run(each_step=cancel)
    for outcome, tokens in zip(one.outcomes, EXPECTED[id(requests)], strict=True):
        assert outcome.token_ids == tokens[: len(outcome.token_ids)]
        assert outcome.token_ids == tokens or outcome.sequence.finish.reason is FinishReason.CANCELLED  # type: ignore[union-attr]
    assert one.core.kv.target_pool.num_held == 0


def test_everyone_cancelled_between_draft_and_verify() -> None:
    one = harness(requests=REQUESTS[:3])
    one.step()
    for sequence in one.core.scheduler.running.copy():
        one.core.end(sequence, Finish(FinishReason.CANCELLED, cause=EndCause.CLIENT))
    assert not one.step()
    later = [one.add(request) for request in REQUESTS[3:6]]
    one.run()
    assert [outcome.token_ids for outcome in later] == EXPECTED[id(REQUESTS)][3:6]


def run_with(requests: list[GenerateRequest], change: Callable[[EngineHarness, int], None]) -> EngineHarness:
    one = harness(requests=requests, max_num_seqs=40, num_blocks=400)

    def each_step(step: int) -> None:
        change(one, step)
        one.clock.now += 0.2

    one.run(each_step=each_step)
    assert texts(one) == EXPECTED[id(requests)]
    return one


@BOTH
def test_a_draft_lost_after_it_has_answered(requests: list[GenerateRequest]) -> None:
    lost = []

    def restart(one: EngineHarness, step: int) -> None:
        if step % 7 == 3:
            lost.append(one.core._unread)
            one.core._draft.restart()  # type: ignore[union-attr]

    one = run_with(requests, restart)
    assert sum(unread is not None for unread in lost) > 1
    assert sum(outcome.sequence.num_preemptions for outcome in one.outcomes) > 0


@BOTH
def test_a_target_lost_before_it_has_read(requests: list[GenerateRequest]) -> None:
    def restart(one: EngineHarness, step: int) -> None:
        if step % 9 == 4:
            one.core._target.restart()  # type: ignore[attr-defined]

    one = run_with(requests, restart)
    assert sum(outcome.sequence.num_preemptions for outcome in one.outcomes) > 0


def test_a_target_that_says_nothing_of_the_draft_is_a_bug() -> None:
    one = harness(requests=REQUESTS[:3])
    verify = one.core._target._verify  # type: ignore[attr-defined]
    one.core._target._verify = lambda plan: replace(verify(plan), draft_status=None)  # type: ignore[attr-defined]
    with pytest.raises(KimiError, match="draft_status of None sequences, 3 were asked"):
        one.run()


def test_a_draft_that_answers_with_ids_is_waited_for() -> None:
    sizes = {"num_blocks": 4000}
    target = CountingTarget(describe("target", SCRIPT, **sizes), SCRIPT)
    draft = ScriptedDraft(describe("draft", SCRIPT, **sizes), SCRIPT, leaves_tokens=False)
    one = EngineHarness(target, draft, SchedulerSettings(max_num_seqs=200), EOS)
    for request in REQUESTS:
        one.add(request)
    one.run()
    assert texts(one) == EXPECTED[id(REQUESTS)]
    assert target.num_read == 0


def test_a_draft_that_cannot_follow_is_asked_again() -> None:
    one = harness(requests=PLAIN, max_num_seqs=200)
    one.core._draft.follow = lambda plan: None  # type: ignore[union-attr, method-assign]
    one.run()
    assert texts(one) == EXPECTED[id(PLAIN)]
    assert one.core._target.num_read > 5  # type: ignore[attr-defined]


def test_a_target_that_does_not_call_is_no_problem() -> None:
    one = harness(requests=PLAIN, max_num_seqs=200)
    one.core._target.launches = False  # type: ignore[attr-defined]
    one.run()
    assert texts(one) == EXPECTED[id(PLAIN)]
    assert one.core._draft.num_followed == 0  # type: ignore[union-attr]


def test_a_draft_that_fails_in_the_middle_of_a_verify_costs_its_speculation_only() -> None:
    """The verify that was under way counts as it would have."""
    one = harness(requests=PLAIN, max_num_seqs=200)

    def fail(step: int) -> None:
        if step == 4:
            one.core._draft.unavailable = True  # type: ignore[union-attr]

    one.run(each_step=fail)
    assert texts(one) == EXPECTED[id(PLAIN)]
    assert not one.core.is_speculating


def run_with_restarts() -> EngineHarness:
    """Every third step somebody is preempted between draft and verify, and starts again in that very verify's step."""
    one = harness(requests=PLAIN, max_num_seqs=40, num_blocks=2000)

    def preempt(step: int) -> None:
        if step % 3 == 2 and one.core.scheduler.running:
            one.core.scheduler.preempt(one.core.scheduler.running[0])

    one.run(each_step=preempt)
    return one


def test_sequences_that_start_again_between_draft_and_verify() -> None:
    one = run_with_restarts()
    assert texts(one) == EXPECTED[id(PLAIN)]
    assert one.core.is_speculating, "the draft is lost"
    assert one.core.scheduler.num_preemptions > 5


def test_a_status_that_is_given_to_whoever_has_the_sequence_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a sequence that was preempted and started anew takes the rows of its former blocks for its own."""

    def planted(self: UnreadDraft, status: list[int]) -> list[tuple[DraftWork, int]]:
        pairs = zip(self.work, status, strict=True)
        return [(item, its_status) for item, its_status in pairs if item.sequence.uses_draft]

    monkeypatch.setattr(UnreadDraft, "still_there", planted)
    with pytest.raises(AssertionError, match="the draft is lost"):
        test_sequences_that_start_again_between_draft_and_verify()


def test_draft_rows_that_count_before_anybody_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: what a failing draft wrote is offered to others."""
    of = UnreadDraft.of.__func__  # type: ignore[attr-defined]

    def planted(cls: type, tokens: TokenHandle, work: list[DraftWork]) -> UnreadDraft:
        for item in work:
            item.sequence.draft_len += item.num_rows
        return of(cls, tokens, work)

    monkeypatch.setattr(UnreadDraft, "of", classmethod(planted))
    with pytest.raises(AssertionError, match="published before anybody knows them"):
        test_a_failed_draft_publishes_nothing()


def test_the_policy_is_told_how_long_the_target_took_after_its_step_was_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounds without a draft are launched ahead, queueing is hidden behind the step before."""
    now, waits = 0.0, list[float]()

    class SlowTarget(ScriptedTarget):
        queues = False

        def _verify(self, plan: TargetPlan) -> TargetReply:
            nonlocal now
            now += 5.0
            return super()._verify(plan)

        def verify_ahead(self, plan: TargetPlan, on_queued: OnQueued) -> TargetReply:
            nonlocal now
            reply = super().verify_ahead(plan, on_queued)
            now += 2.0
            return reply

    class Policy(FixedPolicy):
        def end_round(self, *, is_pure_decode: bool, draft_s: float, target_s: float) -> None:
            waits.append(target_s)

    monkeypatch.setattr("kimi_backend.engine.step_times.perf_counter", lambda: now)
    one = harness(requests=PLAIN[:4])
    one.core._target = one.core._launcher = SlowTarget(describe("target", SCRIPT), SCRIPT)
    one.core._target_link.retry_now()
    one.core.scheduler.policy = Policy()
    one.run()
    assert set(waits) == {2.0, 5.0}, "queued with a draft behind it, or waited for as a whole"
