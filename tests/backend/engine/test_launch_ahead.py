"""A verify launched before the host has the draft's tokens: tokens, rounds and pools as of one that waits for them."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from kimi_backend.errors import KimiError
from kimi_backend.scheduler.sequence import Finish
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.plan import TargetPlan, TargetReply
from kimi_backend.types.request import EndCause, FinishReason, GenerateRequest
from support.engine_runs import EngineHarness
from support.plain_decoding import decode_plainly
from support.random_requests import random_requests
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

VOCAB = 48
SCRIPT = LogitScript(VOCAB)
EOS = frozenset({5})
REQUESTS = random_requests(random.Random(4), 120, VOCAB, longest_prompt=16, longest_output=22)
EXPECTED = decode_plainly(SCRIPT, REQUESTS, eos_token_ids=EOS, max_model_len=128)


class CountingTarget(ScriptedTarget):
    """Counts the verifies that read tokens which the draft left."""

    num_read = 0

    def verify(self, plan: TargetPlan) -> TargetReply:
        self.num_read += plan.draft_tokens.num_seqs > 0
        return super().verify(plan)


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
        {"max_num_seqs": 7, "max_num_batched_tokens": 7, "requests": REQUESTS[:20]},
    ],
)
def test_the_same_steps_as_in_lockstep(settings: dict[str, object]) -> None:
    """Chunks, k of 0 to 7 side by side, penalties and preemptions among them: every step holds the same blocks."""
    lockstep, ahead = (
        harness(launch_ahead=launch_ahead, enable_prefix_cache=False, **settings)  # type: ignore[arg-type]
        for launch_ahead in (False, True)
    )
    assert traced(ahead) == traced(lockstep)
    assert rounds(ahead) == rounds(lockstep)
    assert texts(ahead) == texts(lockstep) == EXPECTED[: len(ahead.outcomes)]
    assert ahead.core._target.num_read > 5  # type: ignore[attr-defined]
    assert lockstep.core._target.num_read == 0  # type: ignore[attr-defined]
    if "num_blocks" in settings:
        assert ahead.core.scheduler.num_preemptions > 0


def test_what_the_draft_fails_to_propose_counts_as_in_lockstep() -> None:
    """No round for its placeholders, though they took rows; no draft for that request afterwards."""
    lockstep, ahead = (
        harness(launch_ahead=launch_ahead, nan_token_id=7, max_num_seqs=200) for launch_ahead in (False, True)
    )
    for one in (lockstep, ahead):
        one.run()
    assert texts(ahead) == texts(lockstep) == EXPECTED
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
    assert published == []
    one.step()
    assert len(published) >= 20


@pytest.mark.parametrize("at_step", [1, 2, 5])
def test_sequences_cancelled_between_draft_and_verify(at_step: int) -> None:
    one = harness(max_num_seqs=40, num_blocks=300, requests=REQUESTS[:60])

    def cancel(step: int) -> None:
        if step == at_step:
            for sequence in one.core.scheduler.running[::3]:
                assert one.core.end(sequence, Finish(FinishReason.CANCELLED, cause=EndCause.CLIENT))

    one.run(each_step=cancel)
    for outcome, tokens in zip(one.outcomes, EXPECTED, strict=False):
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
    assert [outcome.token_ids for outcome in later] == EXPECTED[3:6]


def run_with(change: Callable[[EngineHarness, int], None]) -> EngineHarness:
    one = harness(max_num_seqs=40, num_blocks=400)

    def each_step(step: int) -> None:
        change(one, step)
        one.clock.now += 0.2

    one.run(each_step=each_step)
    assert texts(one) == EXPECTED
    return one


def test_a_draft_lost_after_it_has_answered() -> None:
    lost = []

    def restart(one: EngineHarness, step: int) -> None:
        if step % 7 == 3:
            lost.append(one.core._unread)
            one.core._draft.restart()  # type: ignore[union-attr]

    one = run_with(restart)
    assert sum(unread is not None for unread in lost) > 1
    assert sum(outcome.sequence.num_preemptions for outcome in one.outcomes) > 0


def test_a_target_lost_before_it_has_read() -> None:
    def restart(one: EngineHarness, step: int) -> None:
        if step % 9 == 4:
            one.core._target.restart()  # type: ignore[attr-defined]

    one = run_with(restart)
    assert sum(outcome.sequence.num_preemptions for outcome in one.outcomes) > 0


def test_a_target_that_says_nothing_of_the_draft_is_a_bug() -> None:
    one = harness(requests=REQUESTS[:3])
    verify = one.core._target.verify
    one.core._target.verify = lambda plan: replace(verify(plan), draft_status=None)  # type: ignore[method-assign]
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
    assert texts(one) == EXPECTED
    assert target.num_read == 0
