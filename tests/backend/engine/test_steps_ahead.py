"""Steps without speculation, launched before the host has the tokens of the step before: the same tokens, whoever ends,
leaves, comes or is lost meanwhile."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from kimi_backend.engine.commit import Commit, commit_step
from kimi_backend.engine.steps_ahead import StepsAhead
from kimi_backend.scheduler.scheduler import StepBatch
from kimi_backend.scheduler.sequence import Finish
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.types.plan import TargetPlan, TargetReply
from kimi_backend.types.request import EndCause, FinishReason, GenerateRequest, SamplingParams
from support.engine_runs import EngineHarness, FakeClock, Outcome
from support.plain_decoding import decode_plainly
from support.random_requests import random_requests
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

VOCAB = 48
SCRIPT = LogitScript(VOCAB)
EOS = frozenset({5})
RANDOM = random_requests(random.Random(4), 120, VOCAB, longest_prompt=16, longest_output=22)
"""Greedy and not, with k of 0 to 7, penalties, bans, log-probabilities and stops."""


def plain(request: GenerateRequest) -> GenerateRequest:
    """Without speculation, and without what makes a step wait for the tokens before it."""
    given = request.sampling
    sampling = SamplingParams(
        max_tokens=given.max_tokens,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        seed=given.seed,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
    )
    return replace(request, sampling=sampling, num_speculative_tokens=0)


PLAIN = [plain(request) for request in RANDOM]
LONG = [replace(r, sampling=replace(r.sampling, max_tokens=60, ignore_eos=True)) for r in PLAIN[:8]]
MIXED = [*RANDOM, *LONG[:4]]
"""Of which only some that do not speculate are left in the end."""
DRAFTING = [replace(r, num_speculative_tokens=3) for r in PLAIN]


def texts_of(requests: list[GenerateRequest]) -> list[list[int]]:
    return decode_plainly(SCRIPT, requests, eos_token_ids=EOS, max_model_len=128)


EXPECTED = {id(requests): texts_of(requests) for requests in (MIXED, PLAIN, LONG, DRAFTING)}


def harness(
    requests: list[GenerateRequest],
    *,
    launch_ahead: bool = True,
    has_draft: bool = True,
    num_blocks: int = 4000,
    block_size: int = 4,
    **settings: object,
) -> EngineHarness:
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    made = EngineHarness(
        ScriptedTarget(describe("target", SCRIPT, **sizes), SCRIPT),
        ScriptedDraft(describe("draft", SCRIPT, **sizes), SCRIPT) if has_draft else None,
        SchedulerSettings(launch_ahead=launch_ahead, **settings),  # type: ignore[arg-type]
        EOS,
    )
    for request in requests:
        made.add(request)
    return made


def texts(one: EngineHarness) -> list[list[int]]:
    return [outcome.token_ids for outcome in one.outcomes]


def num_behind(one: EngineHarness) -> int:
    """Steps that were launched before the tokens of the step before were known."""
    found: int = one.core._target.num_behind  # type: ignore[attr-defined]
    return found


def check(one: EngineHarness, requests: list[GenerateRequest], least_behind: int) -> None:
    assert texts(one) == EXPECTED[id(requests)]
    assert num_behind(one) >= least_behind
    kv = one.core.kv
    assert kv.target_pool.num_held == 0
    assert kv.draft_pool is None or kv.draft_pool.num_held == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 200},
        {"max_num_seqs": 30, "max_num_batched_tokens": 60},
        {"max_num_seqs": 60, "num_blocks": 90, "block_size": 2},
        {"max_num_seqs": 7, "max_num_batched_tokens": 7},
    ],
)
@pytest.mark.parametrize(
    ("requests", "has_draft"),
    [(PLAIN, True), (PLAIN, False), (MIXED, True)],
    ids=["plain", "plain, no draft loaded", "mixed"],
)
def test_the_same_tokens_as_in_lockstep(
    settings: dict[str, object], requests: list[GenerateRequest], has_draft: bool
) -> None:
    """With newcomers, chunks, ends, preemptions, and others that speculate or want more of a draw."""
    lockstep, ahead = (
        harness(requests, launch_ahead=launch_ahead, has_draft=has_draft, **settings)  # type: ignore[arg-type]
        for launch_ahead in (False, True)
    )
    lockstep.run()
    assert num_behind(lockstep) == 0
    ahead.run()
    check(ahead, requests, 10)
    assert texts(lockstep) == texts(ahead)
    if "num_blocks" in settings:
        assert ahead.core.scheduler.num_preemptions > 0


def test_nearly_every_step_is_launched_behind_another() -> None:
    """Eight requests of 60 tokens: one step for the prompts, one launched by itself, and the others behind it."""
    one = harness(LONG)
    one.run()
    check(one, LONG, 57)
    assert one.core.num_steps == 60


def test_who_ends_is_in_one_step_too_many_and_gets_no_token_of_it() -> None:
    """A stop token is known one step late; a length is known before."""
    one = harness(PLAIN, max_num_seqs=200)
    late = []

    def look(_: int) -> None:
        step = one.core._ahead
        if step is not None:
            pairs = zip(step.batch.sequences, step.still_there, strict=True)
            late.extend(sequence for sequence, is_there in pairs if not is_there)

    one.run(each_step=look)
    check(one, PLAIN, 10)
    reasons = [sequence.finish.reason for sequence in late if sequence.finish is not None]
    assert len(reasons) == len(late) > 5
    assert set(reasons) == {FinishReason.STOP}


def test_a_token_of_one_step_too_many_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: whoever has left is treated as if he were there."""

    def planted(
        batch: StepBatch, plan: TargetPlan, reply: TargetReply, time_s: float, still_there: list[bool]
    ) -> Commit:
        return commit_step(batch, plan, reply, time_s, [True] * len(still_there))

    monkeypatch.setattr("kimi_backend.engine.core.commit_step", planted)
    with pytest.raises(AssertionError, match="got an output after its last"):
        test_who_ends_is_in_one_step_too_many_and_gets_no_token_of_it()


@pytest.mark.parametrize("at_step", [1, 2, 5, 9])
def test_sequences_cancelled_with_a_step_in_flight(at_step: int) -> None:
    """Their blocks go to others at once, though that step still writes them."""
    one = harness(PLAIN, max_num_seqs=40, num_blocks=300)
    was_in_flight = []

    def cancel(step: int) -> None:
        if step == at_step:
            was_in_flight.append(one.core._ahead is not None)
            for sequence in one.core.scheduler.running[::3]:
                assert one.core.end(sequence, Finish(FinishReason.CANCELLED, cause=EndCause.CLIENT))

    one.run(each_step=cancel)
    for outcome, tokens in zip(one.outcomes, EXPECTED[id(PLAIN)], strict=True):
        assert outcome.token_ids == tokens[: len(outcome.token_ids)]
        assert outcome.token_ids == tokens or outcome.sequence.finish.reason is FinishReason.CANCELLED  # type: ignore[union-attr]
    assert one.core.kv.target_pool.num_held == 0
    assert num_behind(one) > 5


def test_everyone_cancelled_with_a_step_in_flight() -> None:
    one = harness(LONG[:3])
    for _ in range(3):
        one.step()
    assert one.core._ahead is not None
    for sequence in one.core.scheduler.running.copy():
        one.core.end(sequence, Finish(FinishReason.CANCELLED, cause=EndCause.CLIENT))
    later = [one.add(request) for request in LONG[3:6]]
    one.run()
    assert [outcome.token_ids for outcome in later] == EXPECTED[id(LONG)][3:6]
    assert one.core.kv.target_pool.num_held == 0


def test_nobody_left_and_nobody_waiting() -> None:
    """The step in flight is waited for, so that nothing of it is left when the next request comes."""
    one = harness(LONG[:1])
    for _ in range(3):
        one.step()
    one.core.end(one.core.scheduler.running[0], Finish(FinishReason.CANCELLED, cause=EndCause.CLIENT))
    assert one.step()
    assert one.core._ahead is None
    assert not one.step()


def run_with(requests: list[GenerateRequest], change: Callable[[EngineHarness, int], None]) -> EngineHarness:
    one = harness(requests, max_num_seqs=40, num_blocks=400)

    def each_step(step: int) -> None:
        change(one, step)
        one.clock.now += 0.2

    one.run(each_step=each_step)
    check(one, requests, 5)
    return one


def preempt_now_and_then(one: EngineHarness, step: int) -> None:
    if step % 3 == 2 and one.core.scheduler.running:
        one.core.scheduler.preempt(one.core.scheduler.running[0])


def test_sequences_preempted_with_a_step_in_flight() -> None:
    """They are computed again, with the token that the step has drawn for them dropped."""
    one = run_with(PLAIN, preempt_now_and_then)
    assert one.core.scheduler.num_preemptions > 5


@pytest.mark.parametrize("restarts", [False, True])
def test_a_target_lost_with_a_step_in_flight(restarts: bool) -> None:
    in_flight = []

    def lose(one: EngineHarness, step: int) -> None:
        target = one.core._target
        if step % 9 == 4:
            in_flight.append(one.core._ahead is not None)
            if restarts:
                target.restart()  # type: ignore[attr-defined]
            else:
                target.fail_at_steps.add(target.num_steps + 1)  # type: ignore[attr-defined]

    one = run_with(PLAIN, lose)
    assert sum(in_flight) > 1
    assert sum(outcome.sequence.num_preemptions for outcome in one.outcomes) > 0


def test_a_draft_that_comes_back_with_a_step_in_flight() -> None:
    """While it is away its sequences run as those without speculation do; then they are preempted to begin with it."""
    came_back = []

    def lose(one: EngineHarness, step: int) -> None:
        draft = one.core._draft
        assert draft is not None
        draft.unavailable = 4 <= step % 14 < 11  # type: ignore[attr-defined]
        if step % 14 == 10:
            came_back.append(one.core._ahead is not None)

    one = run_with(DRAFTING, lose)
    assert any(came_back)
    assert one.core.scheduler.num_preemptions > 0


class OnAndOff:
    """A policy that lets everybody draft for four rounds and nobody for six."""

    def __init__(self) -> None:
        self.num_chosen_tokens = 3
        self.num_rounds = self.num_thoughts = 0

    def admit(
        self, controller: SpeculationController, running: list[SpeculationController], num_sequences: int
    ) -> None:
        controller.uses_draft = self.num_rounds % 10 < 4

    def begin_round(self, controllers: list[SpeculationController], num_sequences: int) -> None:
        self.num_rounds += 1
        for controller in controllers:
            controller.uses_draft = self.num_rounds % 10 < 4
            controller.num_chosen_tokens = 3 if controller.uses_draft else 0

    def think(self) -> None:
        self.num_thoughts += 1

    def end_round(self, *, is_pure_decode: bool, draft_s: float, target_s: float) -> None:
        assert draft_s >= 0


def test_a_policy_that_lets_nobody_draft_for_a_while() -> None:
    """Those rounds are launched ahead, until it wants somebody to begin, which is one step later than in lockstep."""
    requests = [replace(r, num_speculative_tokens=3) for r in LONG]
    one = harness(requests)
    policy = one.core.scheduler.policy = OnAndOff()
    began_late = set()

    def look(_: int) -> None:
        began_late.update(s.uid for s in one.core.scheduler.running if s.draft_start)

    one.run(each_step=look)
    assert texts(one) == EXPECTED[id(LONG)]
    assert len(began_late) == len(LONG)
    assert num_behind(one) > 10
    assert policy.num_thoughts > 0.7 * policy.num_rounds, "while the device is at work"
    assert sum(accepted for outcome in one.outcomes for _, accepted in outcome.rounds) > 10


def test_a_step_waits_where_somebody_may_start() -> None:
    """A newcomer takes part in the step after the one in flight, and no later."""
    one = harness(LONG[:2])
    for _ in range(3):
        one.step()
    assert one.core._ahead is not None
    newcomer = one.add(LONG[2])
    one.step()
    assert one.core._ahead is None and not newcomer.token_ids
    one.step()
    assert len(newcomer.token_ids) == 1
    one.run()
    assert texts(one) == EXPECTED[id(LONG)][:3]


def first_steps(one: EngineHarness, count: int) -> list[Outcome]:
    for _ in range(count):
        one.step()
    return one.outcomes


def test_nobody_waits_for_somebody_who_cannot_start() -> None:
    """All rows are taken, or there are no blocks: the others go on ahead."""
    full = harness(LONG, max_num_seqs=2)
    first_steps(full, 4)
    assert full.core._ahead is not None
    short = harness(LONG[:1], num_blocks=200, block_size=1)
    first_steps(short, 2)
    pool = short.core.kv.target_pool
    taken = pool.allocate(pool.num_available - 8)
    newcomer = short.add(replace(LONG[1], prompt_token_ids=tuple(range(8, 28))))
    assert short.core.scheduler.may_admit
    first_steps(short, 3)
    assert not short.core.scheduler.may_admit
    assert short.core._ahead is not None
    pool.release(taken)
    short.run()
    assert len(newcomer.token_ids) == 60


def test_without_room_for_the_next_token_a_step_waits() -> None:
    """Blocks are taken before a step is launched: it never fails for memory half-way."""
    one = harness(LONG[:1], num_blocks=200, block_size=1, enable_prefix_cache=False)
    first_steps(one, 3)
    assert one.core._ahead is not None
    pool = one.core.kv.target_pool
    taken = pool.allocate(pool.num_available)
    one.step()
    assert one.core._ahead is None
    pool.release(taken)
    one.run()
    assert texts(one) == EXPECTED[id(LONG)][:1]


def test_a_target_that_cannot_queue_is_no_problem() -> None:
    one = harness(PLAIN)
    one.core._target.queues = False  # type: ignore[attr-defined]
    one.run()
    check(one, PLAIN, 0)
    assert num_behind(one) == 0


def test_one_that_wants_more_of_its_draws_makes_the_others_wait() -> None:
    """Penalties count the token before; log-probabilities and bans are in no captured step."""
    for changes in ({"repetition_penalty": 1.2}, {"logprobs": 2}, {"bad_words": ((3,),)}, {"logit_bias": {3: 1.0}}):
        sampling = replace(LONG[0].sampling, **changes)  # type: ignore[arg-type]
        requests = [replace(LONG[0], sampling=sampling), *LONG[1:3]]
        one = harness(requests)
        one.run()
        assert num_behind(one) == 0
        assert texts(one) == texts_of(requests)


def test_steps_ahead_need_the_setting() -> None:
    assert isinstance(harness(PLAIN[:1]).core._steps_ahead, StepsAhead)
    assert harness(PLAIN[:1], launch_ahead=False).core._steps_ahead is None
    assert FakeClock()() == 100.0
