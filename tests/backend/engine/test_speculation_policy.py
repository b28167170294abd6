"""Whoever chooses k: the same tokens, and statistics that say what was done."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kimi_backend.engine.engine import Engine
from kimi_backend.engine.loop import Patience
from kimi_backend.errors import ModelUnavailableError
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.serving.responses import statistics_json
from kimi_backend.spec_decode.adaptive_policy import AdaptivePolicy
from kimi_backend.spec_decode.policy import PolicyName
from kimi_backend.spec_decode.round_times import Round
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS, GenerateRequest, SamplingParams
from kimi_backend.types.step_costs import StepCosts
from support.engine_checks import check_identities
from support.engine_runs import EngineHarness, Outcome
from support.plain_decoding import decode_plainly
from support.random_policy import RandomPolicy
from support.random_requests import random_requests
from support.recording_client import RecordingClient
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe
from support.waiting import PATIENCE_S, wait_for

VOCAB = 32
EOS = frozenset({5})
MAX_LEN = 96
SCRIPT = LogitScript(VOCAB)


def harness_of(
    async_scheduling: bool, policy: PolicyName = PolicyName.FIXED, *, draft_max_positions: int = 0
) -> EngineHarness:
    sizes = {"block_size": 2, "max_model_len": MAX_LEN, "num_blocks": 1600}
    settings = SchedulerSettings(
        max_num_seqs=20,
        max_num_batched_tokens=60,
        async_scheduling=async_scheduling,
        speculation_policy=policy,
        draft_max_positions=draft_max_positions,
    )
    target = ScriptedTarget(describe("target", SCRIPT, **sizes), SCRIPT)
    return EngineHarness(target, ScriptedDraft(describe("draft", SCRIPT, **sizes), SCRIPT), settings, EOS)


def run_conversations(harness: EngineHarness) -> list[Outcome]:
    """Each request, then two that continue what it got, so that cached blocks of all kinds are met."""
    requests = random_requests(random.Random(3), 40, VOCAB, longest_prompt=12, longest_output=30)
    beginnings = [harness.add(request) for request in requests]
    harness.run()
    for o in beginnings:
        for tail in (2, 3):
            prompt = (*o.request.prompt_token_ids, *o.token_ids, 1, tail)
            harness.add(replace(o.request, prompt_token_ids=prompt))
    harness.run()
    return harness.outcomes


@pytest.mark.parametrize(("seed", "async_scheduling"), [(0, False), (1, True), (2, True)])
def test_a_policy_that_acts_at_random_changes_no_token(seed: int, async_scheduling: bool) -> None:
    harness = harness_of(async_scheduling)
    policy = harness.core.scheduler.policy = RandomPolicy(seed)
    outcomes = run_conversations(harness)
    assert policy.num_begins > 20
    assert policy.num_ends > 20
    expected = decode_plainly(SCRIPT, [o.request for o in outcomes], eos_token_ids=EOS, max_model_len=MAX_LEN)
    for outcome, tokens in zip(outcomes, expected, strict=True):
        assert outcome.token_ids == tokens
        check_identities(outcome)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_adaptive_policy_changes_no_token(async_scheduling: bool) -> None:
    harness = harness_of(async_scheduling, PolicyName.ADAPTIVE)
    policy = harness.core.scheduler.policy
    assert isinstance(policy, AdaptivePolicy)
    rng = random.Random(0)

    def end_round(done: Round) -> None:
        """Rounds of any length, so that it changes its mind."""
        policy.times.learn(replace(done, total_s=done.total_s * rng.choice((1, 3, 9))))
        policy.times._factors[:] = [rng.choice((0.2, 1, 5)) for _ in range(3)]

    policy.end_round = end_round  # type: ignore[method-assign]
    outcomes = run_conversations(harness)
    expected = decode_plainly(SCRIPT, [o.request for o in outcomes], eos_token_ids=EOS, max_model_len=MAX_LEN)
    assert [o.token_ids for o in outcomes] == expected
    drafted = {step.num_draft_tokens for o in outcomes for step in o.steps[1:]}
    assert {0, 1, 3} <= drafted


def test_steps_are_timed_once_the_target_first_and_only_for_a_policy_that_asks() -> None:
    for policy, count in ((PolicyName.FIXED, 0), (PolicyName.ADAPTIVE, 1)):
        harness = harness_of(False, policy)
        target, draft = harness.core._target, harness.core._draft
        assert isinstance(target, ScriptedTarget) and isinstance(draft, ScriptedDraft)
        assert (target.num_measured, draft.num_measured) == (count, count)
        before = harness.core.scheduler.policy
        draft.restart()
        harness.add(GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3), num_speculative_tokens=3))
        harness.run()
        assert (target.num_measured, draft.num_measured) == (count, count), "known already"
        assert harness.core.scheduler.policy is before


@pytest.mark.parametrize(
    ("policy", "asks", "tells"),
    [(PolicyName.ADAPTIVE, True, True), (PolicyName.ADAPTIVE, False, False), (PolicyName.FIXED, True, False)],
)
def test_a_request_is_told_what_steps_cost_if_it_asks(policy: PolicyName, asks: bool, tells: bool) -> None:
    target = ScriptedTarget(describe("target", SCRIPT), SCRIPT)
    draft = ScriptedDraft(describe("draft", SCRIPT), SCRIPT)
    engine = Engine(target, draft, settings=SchedulerSettings(speculation_policy=policy))
    engine.start()
    engine.wait_until_ready(PATIENCE_S)
    client = RecordingClient()
    engine.submit(
        GenerateRequest(
            request_id="r",
            prompt_token_ids=(1, 2),
            sampling=SamplingParams(seed=4, max_tokens=2),
            return_step_costs=asks,
        ),
        client,
    )
    client.wait()
    engine.drain(PATIENCE_S)
    stats = client.deltas[-1].stats
    assert stats is not None
    given = json.loads(json.dumps(statistics_json(stats))).get("step_costs")
    assert (given is not None) is tells
    if tells:
        costs = {name: StepCosts.from_json(json.dumps(values)) for name, values in given.items()}
        assert costs == {"target": target.costs, "draft": draft.costs}


def test_a_draft_that_comes_late_is_timed_when_it_comes() -> None:
    sizes = {"block_size": 2, "max_model_len": MAX_LEN}
    draft = ScriptedDraft(describe("draft", SCRIPT, **sizes), SCRIPT)
    draft.unavailable = True
    engine = Engine(
        ScriptedTarget(describe("target", SCRIPT, **sizes), SCRIPT),
        draft,
        settings=SchedulerSettings(speculation_policy=PolicyName.ADAPTIVE),
        patience=Patience(draft_s=0.1),
    )
    engine.start()
    engine.wait_until_ready(PATIENCE_S)
    assert draft.num_measured == 0
    draft.unavailable = False
    sampling = SamplingParams(seed=4, max_tokens=60, ignore_eos=True)

    def is_measured() -> bool:
        client = RecordingClient()
        engine.submit(GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=sampling), client)
        client.wait()
        return draft.num_measured > 0

    wait_for(is_measured)
    core = engine._loop.core
    assert core is not None
    assert isinstance(core.scheduler.policy, AdaptivePolicy)
    engine.drain(PATIENCE_S)


def test_a_runner_that_leaves_while_its_steps_are_timed_is_met_again() -> None:
    class LeavesOnce(ScriptedDraft):
        def measure_costs(self) -> StepCosts:
            self.num_measured += 1
            if self.num_measured == 1:
                raise ModelUnavailableError("gone")
            return self.costs

    draft = LeavesOnce(describe("draft", SCRIPT), SCRIPT)
    settings = SchedulerSettings(speculation_policy=PolicyName.ADAPTIVE)
    engine = Engine(ScriptedTarget(describe("target", SCRIPT), SCRIPT), draft, settings=settings)
    engine.start()
    engine.wait_until_ready(PATIENCE_S)
    assert draft.num_measured == 2
    engine.drain(PATIENCE_S)


def test_a_request_that_names_no_k_gets_the_largest_where_it_is_chosen() -> None:
    assert SchedulerSettings().largest_k == 3
    assert SchedulerSettings(speculation_policy=PolicyName.ADAPTIVE).largest_k == MAX_SPECULATIVE_TOKENS
    assert SchedulerSettings(speculation_policy=PolicyName.ADAPTIVE, num_speculative_tokens=0).largest_k == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_draft_that_came_late_guesses_right_where_it_knows_the_target(async_scheduling: bool) -> None:
    """Its noise, its positions and its rows are those of the tokens it follows, wherever it began."""
    sizes = {"block_size": 2, "max_model_len": MAX_LEN}
    harness = EngineHarness(
        ScriptedTarget(describe("target", SCRIPT, **sizes), SCRIPT),
        ScriptedDraft(describe("draft", SCRIPT, **sizes), SCRIPT, 1.0),
        SchedulerSettings(async_scheduling=async_scheduling),
    )
    policy = harness.core.scheduler.policy = RandomPolicy(1, restlessness=0.4)
    request = GenerateRequest(
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(seed=1, temperature=1.2),
        num_speculative_tokens=3,
    )
    outcome = harness.add(request)
    harness.run()
    assert policy.num_begins > 1
    assert len(outcome.rounds) > 10
    assert all(accepted == drafted for drafted, accepted in outcome.rounds)


def test_tokens_in_flight_are_verified_when_their_sequence_leaves_the_draft() -> None:
    harness = harness_of(False)
    outcome = harness.add(GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3), num_speculative_tokens=3))
    harness.step()
    sequence = outcome.sequence
    assert sequence.num_draft_tokens == 3
    sequence.speculation.uses_draft = False
    harness.step()
    assert outcome.steps[-1].num_draft_tokens == 3
    assert not sequence.uses_draft
    assert sequence.num_draft_tokens == 0
    draft_pool = harness.core.kv.draft_pool
    assert draft_pool is not None
    assert draft_pool.num_held == 0, "its blocks are free again"


def test_draft_blocks_that_began_in_the_middle_are_shared_with_nobody() -> None:
    harness = harness_of(False)
    sampling = SamplingParams(seed=4, max_tokens=40, ignore_eos=True)
    request = GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling=sampling, num_speculative_tokens=2)
    outcome = harness.add(request)
    harness.step()
    outcome.sequence.speculation.uses_draft = False
    harness.step()
    outcome.sequence.speculation.uses_draft = True
    harness.run()
    again = harness.add(replace(request, prompt_token_ids=(1, 2, 3, *outcome.token_ids)))
    harness.step()
    assert again.sequence.num_cached_tokens == again.sequence.draft_start > 30, (
        "the target's hit, and none of the draft's"
    )
    harness.run()
    assert again.rounds


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_speculation_after_none_keeps_the_prefix_hit(async_scheduling: bool) -> None:
    """The first request of a prompt has no draft; the second one begins its draft behind what the target knows, guesses
    right there, and the third one too, whose prompt the draft has never seen whole."""
    sizes = {"block_size": 2, "max_model_len": MAX_LEN}
    harness = EngineHarness(
        ScriptedTarget(describe("target", SCRIPT, **sizes), SCRIPT),
        ScriptedDraft(describe("draft", SCRIPT, **sizes), SCRIPT, 1.0),
        SchedulerSettings(async_scheduling=async_scheduling),
    )
    prompt = tuple(token % VOCAB for token in range(40))
    sampling = SamplingParams(seed=1, temperature=1.2, max_tokens=20, ignore_eos=True)
    outcomes = []
    for k in (0, 3, 3):
        request = GenerateRequest(
            request_id=f"{len(outcomes)}",
            prompt_token_ids=prompt,
            sampling=sampling,
            num_speculative_tokens=k,
        )
        outcomes.append(harness.add(request))
        harness.run()
    assert [o.sequence.num_cached_tokens for o in outcomes] == [0, 38, 38]
    assert outcomes[0].token_ids == outcomes[1].token_ids == outcomes[2].token_ids
    for outcome in outcomes[1:]:
        assert len(outcome.rounds) >= 4
        assert all(accepted == drafted for drafted, accepted in outcome.rounds)


def test_a_draft_that_lacks_little_computes_it_again() -> None:
    """Half of the prompt is in both caches, all of it in the target's: the draft is worth more with its KV."""
    harness = harness_of(False)
    sampling = SamplingParams(seed=4, max_tokens=6, ignore_eos=True)
    prompt = tuple(token % VOCAB for token in range(41))
    for length, k, expected in ((25, 3, 0), (41, 0, 24), (41, 3, 24)):
        request = GenerateRequest(
            request_id="r", prompt_token_ids=prompt[:length], sampling=sampling, num_speculative_tokens=k
        )
        outcome = harness.add(request)
        harness.run()
        assert outcome.sequence.num_cached_tokens in (expected, expected - 2), (length, k)


@pytest.mark.parametrize("name", [PolicyName.FIXED, PolicyName.ADAPTIVE])
def test_statistics_say_who_chose_and_what(name: PolicyName) -> None:
    engine = Engine(
        ScriptedTarget(describe("target", SCRIPT), SCRIPT),
        ScriptedDraft(describe("draft", SCRIPT), SCRIPT),
        settings=SchedulerSettings(speculation_policy=name),
    )
    engine.start()
    engine.wait_until_ready(PATIENCE_S)
    client = RecordingClient()
    sampling = SamplingParams(seed=4, max_tokens=60, ignore_eos=True)
    engine.submit(GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=sampling), client)
    client.wait()
    statistics = engine.statistics()
    engine.drain(PATIENCE_S)
    stats = client.deltas[-1].stats
    assert stats is not None
    assert stats.speculation is not None
    assert (stats.speculation_policy, statistics.speculation_policy) == (name.value, name.value)
    assert stats.is_draft_there
    histogram = stats.num_draft_tokens_histogram
    assert sum(histogram[1:]) == stats.speculation.num_spec_steps
    assert sum(k * count for k, count in enumerate(histogram)) == stats.speculation.num_draft_tokens
    # Every verify emits its accepted tokens and one more; the first token came from the prompt.
    assert 1 + sum(histogram) + stats.speculation.num_accepted_draft_tokens == 60
    assert statistics.totals.num_draft_tokens_histogram[: len(histogram)] == histogram
    assert 0 <= statistics.num_chosen_draft_tokens <= (3 if name is PolicyName.FIXED else MAX_SPECULATIVE_TOKENS)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_nothing_is_drafted_beyond_what_the_draft_may_see(async_scheduling: bool) -> None:
    limit = 24
    harness = harness_of(async_scheduling, draft_max_positions=limit)
    outcomes = run_conversations(harness)
    expected = decode_plainly(SCRIPT, [o.request for o in outcomes], eos_token_ids=EOS, max_model_len=MAX_LEN)
    for outcome, tokens in zip(outcomes, expected, strict=True):
        assert outcome.token_ids == tokens
        check_identities(outcome)
    starts = [start for outcome in outcomes for start in starts_of_drafted_steps(outcome)]
    assert min(starts) < limit, "short sequences are drafted for"
    # What was proposed before the sequence reached the limit is still verified.
    assert max(starts) < limit + MAX_SPECULATIVE_TOKENS + 1
    assert max(len(o.request.prompt_token_ids) + len(o.token_ids) for o in outcomes) > limit + 20


def starts_of_drafted_steps(outcome: Outcome) -> Iterator[int]:
    """Yield the number of tokens before each step that verified draft tokens."""
    length = len(outcome.request.prompt_token_ids)
    for step in outcome.steps:
        if step.num_draft_tokens:
            yield length
        length += len(step.token_ids)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_it_learns_and_chooses_while_the_target_works(async_scheduling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither makes a round longer: both are behind a launch, before its reply is waited for. No round is left out."""
    harness, events = harness_of(async_scheduling), list[str]()
    policy, target = harness.core.scheduler.policy, harness.core._target

    def note(owner: object, name: str, event: str) -> None:
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (events.append(event), plain(*args))[1])

    note(target, "launch", "launch")
    note(harness.core, "_wait", "wait")
    note(policy, "end_round", "learn")
    note(policy, "prepare_round", "prepare")
    note(policy, "begin_round", "begin")
    sampling = SamplingParams(seed=4, max_tokens=40, ignore_eos=True)
    harness.add(GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=sampling, num_speculative_tokens=3))
    harness.run()
    assert events.count("learn") >= events.count("wait") - 3
    assert events.count("prepare") == events.count("launch") > 8
    for place, event in enumerate(events):
        if event in ("learn", "prepare"):
            before = [other for other in events[:place] if other not in ("learn", "prepare")]
            assert before[-1] == "launch", events[: place + 1]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_it_has_learned_of_every_round_when_there_is_nothing_left_to_do(async_scheduling: bool) -> None:
    """And nothing of a step is kept, with the sequences that were in it, until the next request comes."""
    harness, learned = harness_of(async_scheduling), list[Round]()
    harness.core.scheduler.policy.end_round = learned.append  # type: ignore[method-assign]
    sampling = SamplingParams(seed=4, max_tokens=20, ignore_eos=True)
    harness.add(GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=sampling, num_speculative_tokens=3))
    harness.run()
    num_before = len(learned)
    assert not harness.step(), "nothing is left"
    [outcome] = harness.outcomes
    assert num_before < len(learned) == len(outcome.steps) - 1, "all but the prompt's"
    assert not harness.core._done
