"""Steps launched before the host has the results of those before: tokens, rounds and pools as in lockstep, whoever
ends, leaves, comes or is lost meanwhile. With a draft one step of each model is in flight, else two of the target."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from kimi_backend.engine import core as core_module
from kimi_backend.engine.commit import StepOutput, commit_step
from kimi_backend.engine.in_flight import DraftStep
from kimi_backend.engine.step_times import StepTimes
from kimi_backend.errors import KimiError
from kimi_backend.scheduler.scheduler import StepBatch
from kimi_backend.scheduler.sequence import Finish, Sequence
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.policy import FixedPolicy
from kimi_backend.spec_decode.round_times import Round
from kimi_backend.types.plan import Int32Array, TargetPlan, TargetReply
from kimi_backend.types.request import EndCause, FinishReason, GenerateRequest, SamplingParams
from support.engine_runs import EngineHarness, Outcome
from support.plain_decoding import decode_plainly
from support.random_requests import random_requests
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

VOCAB = 48
SCRIPT = LogitScript(VOCAB)
EOS = frozenset({5})
CANCELLED = Finish(FinishReason.CANCELLED, cause=EndCause.CLIENT)


def plain(request: GenerateRequest, k: int | None) -> GenerateRequest:
    """A request without what makes a step wait for the tokens before it, and without a choice that learns from one
    round more or less. k: None for the request's own."""
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
    return replace(
        request,
        sampling=sampling,
        num_speculative_tokens=request.num_speculative_tokens if k is None else k,
    )


MIXED = random_requests(random.Random(7), 72, VOCAB, longest_prompt=16, longest_output=22)
"""Greedy and not, with k of 0 to 7, penalties, bans, log-probabilities and stops."""
DRAFTING = [plain(request, None) for request in MIXED]
ALONE = [plain(request, 0) for request in MIXED]
LONG = [replace(r, sampling=replace(r.sampling, max_tokens=60, ignore_eos=True)) for r in ALONE[:8]]
LONG_DRAFTING = [replace(r, num_speculative_tokens=3) for r in LONG]
KINDS = {"mixed": MIXED, "drafting": DRAFTING, "alone": ALONE}


def texts_of(requests: list[GenerateRequest]) -> list[list[int]]:
    return decode_plainly(SCRIPT, requests, eos_token_ids=EOS, max_model_len=128)


_texts = dict[int, list[list[int]]]()


def expected_of(requests: list[GenerateRequest]) -> list[list[int]]:
    """The texts of requests that this module holds, decoded when a test first asks for them."""
    return _texts.get(id(requests)) or _texts.setdefault(id(requests), texts_of(requests))


ALL_KINDS = pytest.mark.parametrize("requests", KINDS.values(), ids=KINDS)
OVERLAPPED = pytest.mark.parametrize("requests", [DRAFTING, ALONE], ids=["drafting", "alone"])


class CountingTarget(ScriptedTarget):
    """Counts the verifies that read draft tokens which only the table has."""

    num_read = 0

    def _verify(self, plan: TargetPlan) -> TargetReply:
        self.num_read += bool((plan.num_given < plan.rows.query_lens).any() and plan.draft_step)
        return super()._verify(plan)


def harness(
    requests: list[GenerateRequest],
    *,
    async_scheduling: bool = True,
    has_draft: bool = True,
    depth: int = 2,
    num_blocks: int = 4000,
    block_size: int = 4,
    **settings: object,
) -> EngineHarness:
    """depth: of the target."""
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    target = CountingTarget(describe("target", SCRIPT, **sizes), SCRIPT)
    target.depth = depth
    made = EngineHarness(
        target,
        ScriptedDraft(describe("draft", SCRIPT, **sizes), SCRIPT) if has_draft else None,
        SchedulerSettings(async_scheduling=async_scheduling, **settings),  # type: ignore[arg-type]
        EOS,
    )
    for request in requests:
        made.add(request)
    return made


def texts(one: EngineHarness) -> list[list[int]]:
    return [outcome.token_ids for outcome in one.outcomes]


def rounds(one: EngineHarness) -> list[list[tuple[int, int]]]:
    return [outcome.rounds for outcome in one.outcomes]


def num_overlapped(one: EngineHarness) -> int:
    """Steps that were launched before the results of those before them were known."""
    draft = one.core._draft
    return one.core._target.num_behind + (0 if draft is None else draft.num_overlapped)  # type: ignore[attr-defined]


def check(one: EngineHarness, requests: list[GenerateRequest], least_overlapped: int = 5) -> None:
    assert texts(one) == expected_of(requests)[: len(one.outcomes)]
    assert num_overlapped(one) >= least_overlapped
    kv = one.core.kv
    assert kv.target_pool.num_held == 0
    assert kv.draft_pool is None or kv.draft_pool.num_held == 0


SETTINGS = pytest.mark.parametrize(
    ("num_requests", "settings"),
    [
        (48, {"max_num_seqs": 200}),
        (48, {"max_num_seqs": 30, "max_num_batched_tokens": 60}),
        (48, {"max_num_seqs": 40, "num_blocks": 80, "block_size": 2}),
        (24, {"max_num_seqs": 7, "max_num_batched_tokens": 7}),
    ],
)


@SETTINGS
@ALL_KINDS
@pytest.mark.parametrize("has_draft", [True, False])
def test_the_same_tokens_as_in_lockstep(
    num_requests: int, settings: dict[str, object], requests: list[GenerateRequest], has_draft: bool
) -> None:
    """There are newcomers, chunks, ends, preemptions, and others that want more of a draw."""
    one = harness(requests[:num_requests], has_draft=has_draft, **settings)  # type: ignore[arg-type]
    one.run()
    check(one, requests, 10 if requests is ALONE else 5 if has_draft and requests is DRAFTING else 0)
    if "num_blocks" in settings:
        assert one.core.scheduler.num_preemptions > 0


@SETTINGS
@pytest.mark.parametrize("requests", [MIXED, DRAFTING], ids=["mixed", "drafting"])
def test_the_same_steps_as_in_lockstep(
    num_requests: int, settings: dict[str, object], requests: list[GenerateRequest]
) -> None:
    """Every step holds the same blocks as in lockstep, with one step of each model in flight."""

    def traced(one: EngineHarness) -> list[tuple[int, ...]]:
        trace: list[tuple[int, ...]] = []

        def look(_: int) -> None:
            kv, scheduler = one.core.kv, one.core.scheduler
            assert kv.draft_pool is not None
            held = kv.target_pool.num_held, kv.draft_pool.num_held
            trace.append((len(scheduler.running), len(scheduler.waiting), *held))

        one.run(each_step=look)
        return trace

    lockstep, ahead = (
        harness(
            requests[:num_requests], async_scheduling=async_scheduling, depth=1, enable_prefix_cache=False, **settings
        )  # type: ignore[arg-type]
        for async_scheduling in (False, True)
    )
    assert traced(ahead) == traced(lockstep)
    assert rounds(ahead) == rounds(lockstep)
    check(ahead, requests, 5 if requests is DRAFTING else 0)
    assert ahead.core._target.num_read > 5  # type: ignore[attr-defined]
    assert num_overlapped(lockstep) == lockstep.core._target.num_read == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("requests", [MIXED, DRAFTING], ids=["mixed", "drafting"])
def test_what_the_draft_fails_to_propose_counts_as_in_lockstep(requests: list[GenerateRequest]) -> None:
    """No round for its placeholders, though they took rows; no draft for that request afterwards."""
    both = [
        harness(requests, async_scheduling=async_scheduling, max_num_seqs=200) for async_scheduling in (False, True)
    ]
    for one in both:
        one.core._draft.nan_token_id = 7  # type: ignore[union-attr]
        one.run()
    lockstep, ahead = both
    assert texts(ahead) == texts(lockstep) == expected_of(requests)
    assert rounds(ahead) == rounds(lockstep)
    stopped = [o.sequence.wants_draft for o in ahead.outcomes]
    assert stopped == [o.sequence.wants_draft for o in lockstep.outcomes]
    assert not all(stopped)
    assert ahead.core.kv.draft_pool is not None and ahead.core.kv.draft_pool.num_held == 0


def test_nearly_every_step_is_launched_behind_another() -> None:
    """Eight requests of 60 tokens: two steps for prompts, some of which begin alike, one launched by itself, and the
    others behind it."""
    one = harness(LONG)
    one.run()
    check(one, LONG, 57)
    assert one.core.num_steps == 61


def test_host_given_proposals_stand_beside_those_of_the_draft() -> None:
    """The host writes proposals of every second sequence in place of the draft's: the texts stay the same."""
    one = harness(DRAFTING, max_num_seqs=40)
    num_given = 0

    def replace_some(_: int) -> None:
        nonlocal num_given
        table = one.core.scheduler.table
        for sequence in one.core.scheduler.running[::2]:
            if sequence.num_draft_tokens and table.is_in_table[sequence.row]:
                num_given += 1
                expected = expected_of(DRAFTING)[sequence.uid]
                begin = sequence.num_output_tokens
                guess = (expected[begin : begin + sequence.num_draft_tokens] + [1] * 8)[: sequence.num_draft_tokens]
                table.pending_token_ids[sequence.row, 1 : 1 + len(guess)] = guess
                table.is_in_table[sequence.row] = False

    one.run(each_step=replace_some)
    check(one, DRAFTING)
    assert num_given > 20
    assert one.core._target.num_read > 10  # type: ignore[attr-defined]


def test_a_failed_draft_publishes_nothing() -> None:
    """Its blocks are offered to others only when a verify has told that they are good."""
    request = replace(DRAFTING[0], prompt_token_ids=tuple(range(8, 28)), num_speculative_tokens=3)
    one = harness([request], block_size=1)
    published: list[int] = []
    one.core.kv.prefix_cache.publish_draft = lambda key, block: published.append(block)  # type: ignore[method-assign]
    one.step()
    assert one.core._unread is not None
    assert published == [], "published before anybody knows them"
    one.step()
    assert len(published) >= 20


def test_draft_rows_that_count_before_anybody_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: what a failing draft wrote is offered to others."""
    count = DraftStep.count

    def planted(self: DraftStep, num_accepted: Int32Array) -> Int32Array:
        found = count(self, num_accepted)
        for sequence, num_rows in zip(self.sequences, self.num_rows, strict=True):
            sequence.draft_len += num_rows
        return found

    monkeypatch.setattr(DraftStep, "count", planted)
    with pytest.raises(AssertionError, match="published before anybody knows them"):
        test_a_failed_draft_publishes_nothing()


@pytest.mark.parametrize("at_step", [1, 2, 5, 9])
@ALL_KINDS
def test_sequences_cancelled_with_a_step_in_flight(at_step: int, requests: list[GenerateRequest]) -> None:
    """Their blocks go to others at once, though that step still writes them."""
    one = harness(requests, max_num_seqs=40, num_blocks=300)

    def cancel(step: int) -> None:
        if step == at_step:
            for sequence in one.core.scheduler.running[::3]:
                assert one.core.end(sequence, CANCELLED)

    one.run(each_step=cancel)
    for outcome, tokens in zip(one.outcomes, expected_of(requests), strict=True):
        assert outcome.token_ids == tokens[: len(outcome.token_ids)]
        assert outcome.token_ids == tokens or outcome.sequence.finish.reason is FinishReason.CANCELLED  # type: ignore[union-attr]
    assert one.core.kv.target_pool.num_held == 0
    assert requests is MIXED or num_overlapped(one) > 5


@pytest.mark.parametrize("requests", [LONG, LONG_DRAFTING], ids=["alone", "drafting"])
def test_everyone_cancelled_with_a_step_in_flight(requests: list[GenerateRequest]) -> None:
    one = harness(requests[:3])
    first_steps(one, 3)
    assert one.core._flight or one.core._unread
    for sequence in one.core.scheduler.running.copy():
        one.core.end(sequence, CANCELLED)
    later = [one.add(request) for request in requests[3:6]]
    one.run()
    assert [outcome.token_ids for outcome in later] == expected_of(LONG)[3:6]
    assert one.core.kv.target_pool.num_held == 0


def test_nobody_left_and_nobody_waiting() -> None:
    """The step in flight is waited for, so that nothing of it is left when the next request comes."""
    one = harness(LONG[:1])
    first_steps(one, 3)
    one.core.end(one.core.scheduler.running[0], CANCELLED)
    assert one.step()
    assert not one.core._flight
    assert not one.step()


def run_with(
    requests: list[GenerateRequest], change: Callable[[EngineHarness, int], None], num_blocks: int = 400
) -> EngineHarness:
    one = harness(requests, max_num_seqs=40, num_blocks=num_blocks)

    def each_step(step: int) -> None:
        change(one, step)
        one.clock.now += 0.2

    one.run(each_step=each_step)
    check(one, requests, 0 if requests is MIXED else 5)
    return one


def preempt_now_and_then(one: EngineHarness, step: int) -> None:
    unread = one.core._unread
    rows = {} if unread is None else {id(sequence): unread.num_rows[index] for index, sequence in unread.still_there()}
    for sequence in one.core.scheduler.running:
        known = sequence.draft_len + rows.get(id(sequence), 0)
        assert not sequence.uses_draft or known == sequence.target_len, "rows of its former blocks count"
    if step % 4 == 3 and one.core.scheduler.running:
        one.core.scheduler.preempt(one.core.scheduler.running[0])


@OVERLAPPED
def test_sequences_preempted_with_a_step_in_flight(requests: list[GenerateRequest]) -> None:
    """They are computed again, maybe in the very next step, and what the one in flight says is no longer theirs."""
    one = run_with(requests, preempt_now_and_then, num_blocks=2000)
    assert one.core.scheduler.is_drafting, "the draft is lost"
    assert all(o.sequence.wants_draft == bool(o.request.num_speculative_tokens) for o in one.outcomes), (
        "the draft is lost"
    )
    assert one.core.scheduler.num_preemptions > 5


def test_a_status_that_is_given_to_whoever_has_the_sequence_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a sequence that was preempted and started anew takes the rows of its former blocks for its own."""

    def planted(self: DraftStep) -> list[tuple[int, Sequence]]:
        return [(index, sequence) for index, sequence in enumerate(self.sequences) if sequence.uses_draft]

    monkeypatch.setattr(DraftStep, "still_there", planted)
    with pytest.raises(AssertionError, match=r"rows of its former blocks count|the draft is lost"):
        test_sequences_preempted_with_a_step_in_flight(DRAFTING)


@pytest.mark.parametrize("restarts", [False, True])
@ALL_KINDS
def test_a_target_lost_with_a_step_in_flight(restarts: bool, requests: list[GenerateRequest]) -> None:
    def lose(one: EngineHarness, step: int) -> None:
        target = one.core._target
        if step % 9 == 4:
            if restarts:
                target.restart()  # type: ignore[attr-defined]
            else:
                target.fail_at_steps.add(target.num_steps + 1)  # type: ignore[attr-defined]

    one = run_with(requests, lose)
    assert sum(outcome.sequence.num_preemptions for outcome in one.outcomes) > 0


@pytest.mark.parametrize("requests", [MIXED, DRAFTING], ids=["mixed", "drafting"])
def test_a_draft_lost_after_it_has_answered(requests: list[GenerateRequest]) -> None:
    lost = []

    def restart(one: EngineHarness, step: int) -> None:
        if step % 7 == 3:
            lost.append(one.core._unread)
            one.core._draft.restart()  # type: ignore[union-attr]

    one = run_with(requests, restart)
    assert sum(unread is not None for unread in lost) > 1
    assert sum(outcome.sequence.num_preemptions for outcome in one.outcomes) > 0


def test_a_draft_that_comes_back_with_a_step_in_flight() -> None:
    """Its sequences run as those without speculation do while it is away; then they are preempted to begin with it."""
    came_back = []

    def lose(one: EngineHarness, step: int) -> None:
        draft = one.core._draft
        assert draft is not None
        draft.unavailable = 4 <= step % 14 < 11  # type: ignore[attr-defined]
        if step % 14 == 10:
            came_back.append(bool(one.core._flight))

    one = run_with(DRAFTING, lose)
    assert any(came_back)
    assert one.core.scheduler.num_preemptions > 0


def test_a_draft_that_fails_behind_a_verify_costs_its_speculation_only() -> None:
    """The verify that was under way counts as it would have."""
    one = harness(DRAFTING, max_num_seqs=200)

    def fail(step: int) -> None:
        if step == 4:
            one.core._draft.unavailable = True  # type: ignore[union-attr]

    one.run(each_step=fail)
    check(one, DRAFTING, 0)
    assert not one.core.scheduler.is_drafting


def test_a_target_that_says_nothing_of_the_draft_is_a_bug() -> None:
    one = harness(LONG_DRAFTING[:3])
    verify = one.core._target._verify  # type: ignore[attr-defined]
    one.core._target._verify = lambda plan: replace(verify(plan), draft_status=None)  # type: ignore[attr-defined]
    with pytest.raises(KimiError, match="draft_status of None sequences, 3 were asked"):
        one.run()


@pytest.mark.parametrize("target_depth", [0, 1, 2])
@pytest.mark.parametrize("in_table", [False, True])
@ALL_KINDS
def test_whatever_the_runners_can_do_the_texts_are_the_same(
    target_depth: int, in_table: bool, requests: list[GenerateRequest]
) -> None:
    one = harness(requests, depth=target_depth, max_num_seqs=200)
    one.core._draft._in_table = in_table  # type: ignore[union-attr]
    one.run()
    assert texts(one) == expected_of(requests)
    num_behind, num_drafts = one.core._target.num_behind, one.core._draft.num_overlapped  # type: ignore[attr-defined, union-attr]
    assert (num_behind > 0) == (target_depth == 2 and requests is not MIXED), "two steps in flight"
    assert (num_drafts > 0) == (target_depth > 0 and in_table and requests is DRAFTING)
    assert in_table or not one.core._target.num_read  # type: ignore[attr-defined]


def late_ends(one: EngineHarness) -> list[Sequence]:
    """Run to the end; those that have left with a step in flight which has a row of theirs."""
    late: list[Sequence] = []

    def look(_: int) -> None:
        for step in one.core._flight:
            pairs = zip(step.batch.sequences, step.still_there, strict=True)
            late.extend(sequence for sequence, is_there in pairs if not is_there)

    one.run(each_step=look)
    return late


def test_who_ends_is_in_one_step_too_many_and_gets_no_token_of_it() -> None:
    """A stop token is known one step late; a length is known before."""
    one = harness(ALONE, max_num_seqs=200)
    late = late_ends(one)
    check(one, ALONE, 10)
    reasons = [sequence.finish.reason for sequence in late if sequence.finish is not None]
    assert len(reasons) == len(late) > 3
    assert set(reasons) == {FinishReason.STOP}


def test_a_token_of_one_step_too_many_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: whoever has left is given the step's token."""

    def planted(
        batch: StepBatch, plan: TargetPlan, reply: TargetReply, time_s: float, still_there: list[bool]
    ) -> list[StepOutput]:
        return commit_step(batch, plan, reply, time_s, [True] * len(still_there))

    monkeypatch.setattr(core_module, "commit_step", planted)
    one = harness(ALONE, max_num_seqs=200)
    with pytest.raises(AssertionError, match="got an output after its last"):
        late_ends(one)


class OnAndOff(FixedPolicy):
    """A policy that lets everybody draft for four rounds and nobody for six."""

    def __init__(self) -> None:
        super().__init__()
        self.num_rounds = 0
        self.done: list[Round] = []

    def admit(
        self,
        controller: SpeculationController,
        running: list[SpeculationController],
        num_sequences: int,
        num_context_tokens: int,
    ) -> None:
        controller.uses_draft = self.num_rounds % 10 < 4

    def begin_round(
        self, controllers: list[SpeculationController], num_sequences: int, num_context_tokens: int
    ) -> None:
        self.num_rounds += 1
        for controller in controllers:
            controller.uses_draft = self.num_rounds % 10 < 4
            controller.num_chosen_tokens = 3 if controller.uses_draft else 0

    def end_round(self, done: Round) -> None:
        self.done.append(done)


def test_a_policy_that_lets_nobody_draft_for_a_while() -> None:
    """Those rounds overlap, until it wants somebody to begin, which is one step later than in lockstep."""
    one = harness(LONG_DRAFTING)
    policy = one.core.scheduler.policy = OnAndOff()
    began_late = set()

    def look(_: int) -> None:
        began_late.update(s.uid for s in one.core.scheduler.running if s.draft_start)

    one.run(each_step=look)
    assert texts(one) == expected_of(LONG)
    assert len(began_late) == len(LONG)
    assert one.core._target.num_behind > 10  # type: ignore[attr-defined]
    assert sum(done.is_overlapped for done in policy.done) > 0.7 * policy.num_rounds
    drafted = [(done.target, done.draft) for done in policy.done if done.draft is not None]
    assert len(drafted) > 5
    assert all(target.longest <= draft.num_proposals + 1 for target, draft in drafted), "the draft step that it read"
    assert sum(accepted for outcome in one.outcomes for _, accepted in outcome.rounds) > 10


def first_steps(one: EngineHarness, count: int) -> list[Outcome]:
    for _ in range(count):
        one.step()
    return one.outcomes


def test_a_step_waits_where_somebody_may_start() -> None:
    """A newcomer takes part in the step after the one in flight, and no later."""
    one = harness(LONG[:2])
    first_steps(one, 4)
    assert one.core._flight
    newcomer = one.add(LONG[2])
    one.step()
    assert not one.core._flight and not newcomer.token_ids
    one.step()
    assert len(newcomer.token_ids) == 1
    one.run()
    assert texts(one) == expected_of(LONG)[:3]


def test_nobody_waits_for_somebody_who_cannot_start() -> None:
    """All rows are taken, or there are no blocks: the others go on overlapped."""
    full = harness(LONG, max_num_seqs=2)
    first_steps(full, 5)
    assert full.core._flight
    short = harness(LONG[:1], num_blocks=200, block_size=1)
    first_steps(short, 3)
    pool = short.core.kv.target_pool
    taken = pool.allocate(pool.num_available - 8)
    newcomer = short.add(replace(LONG[1], prompt_token_ids=tuple(range(8, 28))))
    assert short.core.scheduler.may_admit
    first_steps(short, 4)
    assert not short.core.scheduler.may_admit
    assert short.core._flight
    pool.release(taken)
    short.run()
    assert len(newcomer.token_ids) == 60


def test_without_room_for_the_next_token_a_step_waits() -> None:
    """Blocks are taken before a step is launched: it never fails for memory half-way."""
    one = harness(LONG[:1], num_blocks=200, block_size=1, enable_prefix_cache=False)
    first_steps(one, 4)
    assert one.core._flight
    pool = one.core.kv.target_pool
    taken = pool.allocate(pool.num_available)
    one.step()
    assert not one.core._flight
    pool.release(taken)
    one.run()
    assert texts(one) == expected_of(LONG)[:1]


def test_one_that_wants_more_of_its_draws_makes_the_others_wait() -> None:
    """Penalties count the token before; log-probabilities and bans are in no captured step."""
    for changes in ({"repetition_penalty": 1.2}, {"logprobs": 2}, {"bad_words": ((3,),)}, {"logit_bias": {3: 1.0}}):
        sampling = replace(LONG[0].sampling, **changes)  # type: ignore[arg-type]
        requests = [replace(LONG[0], sampling=sampling), *LONG[1:3]]
        one = harness(requests)
        one.run()
        assert num_overlapped(one) == 0
        assert texts(one) == texts_of(requests)


def test_an_overlapped_rounds_target_takes_from_its_launch_to_its_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may have had nothing to do before: a launch is the host's time."""
    monkeypatch.setattr(StepTimes, "since_launch", 1234.5)
    one = harness(LONG_DRAFTING)
    policy = one.core.scheduler.policy = OnAndOff()
    one.run()
    assert {done.is_overlapped for done in policy.done} == {True, False}
    assert all((done.target_s == 1234.5) is done.is_overlapped for done in policy.done)
