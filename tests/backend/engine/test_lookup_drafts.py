"""Proposals of a sequence's own text: checked beside those of the draft, exact whatever goes wrong around them."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kimi_backend.engine import host_drafts
from kimi_backend.scheduler.batch_table import BatchTable
from kimi_backend.scheduler.scheduler import Scheduler
from kimi_backend.scheduler.sequence import Sequence
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.spec_decode import lookup
from kimi_backend.spec_decode.looked_up import LookedUp
from kimi_backend.spec_decode.lookup import SequenceLookup
from kimi_backend.spec_decode.lookup_index import Match
from kimi_backend.types.plan import Int32Array
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenOrigin
from support.check_errors import WrongTokensError
from support.engine_checks import check_identities
from support.engine_runs import EngineHarness
from support.lookup_checks import WrongDraftTokenError, checks_looked_up_rows
from support.plain_decoding import decode_plainly
from support.random_requests import random_requests
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

VOCAB, EOS, MAX_LEN = 32, frozenset({5}), 64
SCRIPT = LogitScript(VOCAB)


def some_requests(count: int, **changes: Any) -> list[GenerateRequest]:
    """Random requests; half of them draw from three tokens only, so that what stood before comes again."""
    requests = random_requests(random.Random(1), count, VOCAB, longest_prompt=12, longest_output=24)
    few = [replace(r, sampling=replace(r.sampling, allowed_token_ids=(6, 7, 8), bad_words=())) for r in requests[::2]]
    return [replace(r, num_speculative_tokens=7, **changes) for r in few + requests[1::2]]


def run(
    requests: list[GenerateRequest],
    proposer: Proposer = Proposer.LOOKUP_EAGLE3,
    *,
    num_blocks: int = 100,
    script: LogitScript = SCRIPT,
    **sizes: Any,
) -> EngineHarness:
    """Everything on pools that preempt, each verify checked; every request gets the tokens of plain decoding."""
    of_pool = {"block_size": 1, "max_model_len": MAX_LEN, "num_blocks": num_blocks}
    target = ScriptedTarget(describe("target", script, **of_pool), script)
    draft = ScriptedDraft(describe("draft", script, **of_pool), script) if proposer.uses_draft else None
    settings = SchedulerSettings(
        max_num_seqs=24, max_num_batched_tokens=150, proposer=proposer, lookup_min_match=2, **sizes
    )
    harness = EngineHarness(target, draft, settings, EOS)
    target.launch = checks_looked_up_rows(harness, target.launch)  # type: ignore[method-assign]
    for request in requests:
        harness.add(request)
    harness.run()
    expected = decode_plainly(script, requests, eos_token_ids=EOS, max_model_len=MAX_LEN)
    for outcome, tokens in zip(harness.outcomes, expected, strict=True):
        if outcome.token_ids != tokens:
            raise WrongTokensError(f"{outcome.request}: {outcome.token_ids}, plain decoding gives {tokens}")
        check_identities(outcome)
    return harness


def rounds_of(harness: EngineHarness, origin: TokenOrigin) -> list[tuple[int, int]]:
    """(checked, accepted) of each verify of tokens of one origin."""
    steps = [step for outcome in harness.outcomes for step in outcome.steps if step.draft_origin is origin]
    return [(step.num_draft_tokens, step.num_accepted) for step in steps if step.num_draft_tokens]


@pytest.mark.parametrize(
    ("proposer", "async_scheduling"), [*((proposer, True) for proposer in Proposer), (Proposer.LOOKUP_EAGLE3, False)]
)
def test_every_proposer_gives_the_tokens_of_plain_decoding(proposer: Proposer, async_scheduling: bool) -> None:
    harness = run(some_requests(24), proposer, async_scheduling=async_scheduling)
    looked_up, drafted = (rounds_of(harness, origin) for origin in (TokenOrigin.LOOKUP, TokenOrigin.DRAFT))
    assert (len(looked_up) > 20) is proposer.uses_lookup
    assert (sum(accepted for _, accepted in looked_up) > 8) is proposer.uses_lookup
    assert (len(drafted) > 20) is proposer.uses_draft
    assert harness.core.scheduler.num_preemptions > 0


def test_what_each_verify_would_have_looked_up_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, int]] = []
    end_verify = LookedUp.end_verify

    def tell(one: LookedUp, num_tokens: int, num_found: int, num_checked: int) -> None:
        told.append((num_tokens, num_found, num_checked))
        end_verify(one, num_tokens, num_found, num_checked)

    monkeypatch.setattr(LookedUp, "end_verify", tell)
    harness = run(some_requests(24))
    steps = [step for outcome in harness.outcomes for step in outcome.steps]
    checked = [step.num_draft_tokens for step in steps if step.draft_origin is TokenOrigin.LOOKUP]
    assert sum(num_tokens for num_tokens, _, _ in told) == sum(len(step.token_ids) for step in steps)
    assert sorted(count for _, _, count in told if count) == sorted(count for count in checked if count)
    assert sum(found > 0 for _, found, _ in told) > 20
    assert all(found <= num_tokens for num_tokens, found, _ in told)


def test_requests_are_told_apart_by_how_their_prompts_end() -> None:
    span = tuple(range(20))
    harness = run([replace(r, prompt_token_ids=p) for r, p in zip(some_requests(2), (span, 3 * span), strict=True)])
    assert [outcome.sequence.speculation.repetition for outcome in harness.outcomes] == [0, 1]


def test_a_request_may_ask_for_less_than_the_server_has() -> None:
    requests = [replace(r, proposer=list(Proposer)[i % 4]) for i, r in enumerate(some_requests(24))]
    harness = run(requests)
    for outcome in harness.outcomes:
        proposer = outcome.request.proposer
        assert proposer is not None
        origins = {step.draft_origin for step in outcome.steps if step.num_draft_tokens}
        allowed = {TokenOrigin.DRAFT} if proposer.uses_draft else set()
        assert origins <= allowed | ({TokenOrigin.LOOKUP} if proposer.uses_lookup else set())


def test_without_a_draft_steps_overlap_until_there_is_a_match() -> None:
    """There soon is one with six tokens."""
    requests = [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=(i % 4, 1, 2),
            sampling=SamplingParams(seed=i, max_tokens=40, ignore_eos=True),
            num_speculative_tokens=4,
        )
        for i in range(3)
    ]
    harness = run(requests, Proposer.LOOKUP, num_blocks=900, script=LogitScript(6))
    target = harness.core._target
    assert isinstance(target, ScriptedTarget)
    assert target.num_behind > 3
    assert rounds_of(harness, TokenOrigin.LOOKUP)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_while_all_follow_a_match_the_draft_only_extends_and_proposes_one(async_scheduling: bool) -> None:
    """Each token is the one before: of a text that foretells itself the draft draws what its extension gives."""
    sampling = SamplingParams(temperature=0, seed=1, max_tokens=40, allowed_token_ids=(6,))
    request = GenerateRequest(request_id="r", prompt_token_ids=(6,) * 12, sampling=sampling, num_speculative_tokens=5)
    plans: list[int] = []
    launch = ScriptedDraft.launch

    def launched(self: ScriptedDraft, plan: Any) -> Any:
        plans.append(int(plan.num_proposals.max()))
        return launch(self, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedDraft, "launch", launched)
        harness = run([request], async_scheduling=async_scheduling)
    assert plans[0] == 5, "of the prompt's end"
    assert set(plans[-3:]) <= {0, 1}, "as soon as it is known to be right more often"
    assert all(accepted == checked for checked, accepted in rounds_of(harness, TokenOrigin.LOOKUP))


def test_one_without_memory_for_its_index_goes_on_without() -> None:
    harness = run(some_requests(24), Proposer.LOOKUP, lookup_memory_bytes=20 * 576)
    assert harness.lookup_memory.num_refused > 0
    assert rounds_of(harness, TokenOrigin.LOOKUP)
    assert harness.lookup_memory.num_bytes == 0, "an end gives it back, whoever keeps the sequence"


def test_indexes_that_fill_up_in_the_same_step_grow_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a long prompt's choices would stand everybody else still."""
    grown: list[int] = []
    grow = SequenceLookup.grow

    def counted(self: SequenceLookup, text: Int32Array) -> None:
        grown.append(len(text))
        grow(self, text)

    monkeypatch.setattr(SequenceLookup, "grow", counted)
    monkeypatch.setattr(host_drafts, "MOST_GROWN_TOKENS", 1)
    sampling = SamplingParams(max_tokens=50, ignore_eos=True)
    prompt = tuple(i % VOCAB for i in range(62))
    requests = [
        GenerateRequest(
            request_id=str(i), prompt_token_ids=prompt, sampling=replace(sampling, seed=i), num_speculative_tokens=2
        )
        for i in range(12)
    ]
    target = ScriptedTarget(describe("target", SCRIPT, num_blocks=1500, block_size=1), SCRIPT)
    harness = EngineHarness(target, None, SchedulerSettings(proposer=Proposer.LOOKUP), EOS)
    for request in requests:
        harness.add(request)
    by_step: list[int] = []
    harness.run(each_step=lambda _: by_step.append(len(grown)))
    assert max(after - before for before, after in zip([0, *by_step], by_step, strict=False)) == 1
    assert len(grown) == 12
    expected = decode_plainly(SCRIPT, requests, eos_token_ids=EOS, max_model_len=128)
    assert [outcome.token_ids for outcome in harness.outcomes] == expected


def test_a_step_grows_indexes_of_sixteen_thousand_tokens() -> None:
    """About 1 ms: the last of them may go beyond."""
    target = ScriptedTarget(describe("target", SCRIPT, num_blocks=9000, block_size=4, max_model_len=6100), SCRIPT)
    harness = EngineHarness(target, None, SchedulerSettings(proposer=Proposer.LOOKUP), EOS)
    grown: list[int] = []

    class Crowded:
        is_crowded = True

        def grow(self, text: Int32Array) -> None:
            grown.append(len(text))

        def find(self, *_: Any) -> None:
            pass

    sequences = []
    for uid in range(5):
        request = GenerateRequest(request_id=str(uid), prompt_token_ids=(1,) * 6000, num_speculative_tokens=2)
        outcome = harness.add(request)
        outcome.sequence.lookup = Crowded()  # type: ignore[assignment]
        outcome.sequence.target_len = 5999
        sequences.append(outcome.sequence)
    assert not harness.core._planner.host_drafts.are_worth_waiting_for(sequences)
    assert grown == [6000] * 3


Patch = pytest.MonkeyPatch


def a_match_past_the_end(patch: Patch) -> None:
    """Tokens that lie behind the text's end in its array are taken for text."""

    def planted(text: Int32Array, match: Match, count: int) -> list[int]:
        whole = text if text.base is None else text.base
        return [int(token) % VOCAB for token in whole[match.end : match.end + count]] + [0] * (
            count - len(whole[match.end : match.end + count])
        )

    patch.setattr(lookup, "continuation", planted)


def an_override_in_the_wrong_row(patch: Patch) -> None:
    give = BatchTable.give_draft_tokens

    def planted(self: BatchTable, sequence: Sequence, token_ids: list[int], origin: TokenOrigin) -> None:
        give(self, sequence, token_ids, origin)
        self.pending_token_ids[:, 1 : 1 + len(token_ids)] = self.pending_token_ids[::-1, 1 : 1 + len(token_ids)].copy()

    patch.setattr(BatchTable, "give_draft_tokens", planted)


def draft_tokens_kept_over_a_preemption(patch: Patch) -> None:
    preempt = Scheduler.preempt

    def planted(self: Scheduler, sequence: Sequence) -> None:
        num_draft_tokens = sequence.num_draft_tokens
        preempt(self, sequence)
        sequence.num_draft_tokens = num_draft_tokens

    patch.setattr(Scheduler, "preempt", planted)


def an_index_that_takes_a_preempted_text_twice(patch: Patch) -> None:
    preempt = Scheduler.preempt

    def planted(self: Scheduler, sequence: Sequence) -> None:
        preempt(self, sequence)
        if sequence.lookup is not None and sequence.lookup._index is not None:
            sequence.lookup._index.extend(sequence.token_ids[-3:].tolist(), sequence.token_ids)

    patch.setattr(Scheduler, "preempt", planted)


def proposals_of_the_table_taken_for_given(patch: Patch) -> None:
    give = BatchTable.give_draft_tokens

    def planted(self: BatchTable, sequence: Sequence, token_ids: list[int], origin: TokenOrigin) -> None:
        was_in_table = self.is_in_table[sequence.row]
        give(self, sequence, token_ids, origin)
        self.is_in_table[sequence.row] = was_in_table

    patch.setattr(BatchTable, "give_draft_tokens", planted)


@pytest.mark.parametrize(
    "plant",
    [
        a_match_past_the_end,
        an_override_in_the_wrong_row,
        draft_tokens_kept_over_a_preemption,
        an_index_that_takes_a_preempted_text_twice,
        proposals_of_the_table_taken_for_given,
    ],
)
def test_a_planted_fault_is_seen(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises((WrongDraftTokenError, IndexError, AssertionError)):
        run(some_requests(24), num_blocks=90)
