"""A reply that follows a grammar is that of plain decoding with the same masks, whatever is guessed and whoever runs
beside it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kimi_backend.grammar.window import SequenceGrammar, Window
from kimi_backend.scheduler.sequence import Sequence as EngineSequence
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.grammar import JsonSchema
from kimi_backend.types.request import FinishReason, GenerateRequest
from support.engine_runs import EngineHarness, Outcome
from support.grammar_requests import EOS, OBJECT, TOKENIZER, VOCAB, compile_grammar, grammar_requests
from support.plain_decoding import decode_plainly
from support.scripted_logits import LogitScript, prefix_hash
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

MAX_LEN = 128
SCRIPT = LogitScript(VOCAB)
REQUESTS = grammar_requests(18)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return decode_plainly(SCRIPT, REQUESTS, eos_token_ids=EOS, max_model_len=MAX_LEN, compile_grammar=compile_grammar)


def run(
    requests: Sequence[GenerateRequest],
    *,
    k: int | None = None,
    overlaps: bool = True,
    num_blocks: int = 1600,
    agreement: float | None = 0.7,
) -> list[Outcome]:
    """agreement: the draft's; None: no draft."""
    sizes = {"block_size": 2, "max_model_len": MAX_LEN, "num_blocks": num_blocks}
    draft = None if agreement is None else ScriptedDraft(describe("draft", SCRIPT, **sizes), SCRIPT, agreement)
    harness = EngineHarness(
        ScriptedTarget(describe("target", SCRIPT, **sizes), SCRIPT),
        draft,
        SchedulerSettings(max_num_seqs=100, max_num_batched_tokens=200, async_scheduling=overlaps),
        EOS,
        compile_grammar,
    )
    outcomes = [harness.add(r if k is None else replace(r, num_speculative_tokens=k)) for r in requests]
    harness.run()
    assert harness.core.scheduler.num_preemptions > 0 or num_blocks > 1000
    return outcomes


def tokens(outcomes: list[Outcome]) -> list[list[int]]:
    return [outcome.token_ids for outcome in outcomes]


@pytest.mark.parametrize(("k", "overlaps"), [(0, True), (1, True), (3, True), (7, True), (3, False)])
def test_the_tokens_are_those_of_plain_decoding_for_every_k(k: int, overlaps: bool, expected: list[list[int]]) -> None:
    assert tokens(run(REQUESTS, k=k, overlaps=overlaps)) == expected


@pytest.mark.parametrize("agreement", [None, 0.0])
def test_whoever_drafts(agreement: float | None, expected: list[list[int]]) -> None:
    assert tokens(run(REQUESTS, k=3, agreement=agreement)) == expected


def test_a_sequence_that_is_preempted_goes_on_in_its_grammar(expected: list[list[int]]) -> None:
    assert tokens(run(REQUESTS, num_blocks=64)) == expected


def test_most_end_by_themselves_and_fit(expected: list[list[int]]) -> None:
    num_ended = 0
    for outcome in run(REQUESTS, k=3):
        grammar = outcome.request.sampling.grammar
        assert outcome.finishes[0].reason in (FinishReason.STOP, FinishReason.LENGTH)
        if grammar is None or outcome.finishes[0].reason is not FinishReason.STOP:
            continue
        num_ended += 1
        begin = grammar.begins_after
        text = TOKENIZER.decode(outcome.token_ids[0 if begin is None else outcome.token_ids.index(begin) + 1 : -1])
        if grammar.form == JsonSchema(json.dumps(OBJECT)):
            value = json.loads(text)
            assert {"a", "st"} <= value.keys() <= OBJECT["properties"].keys()  # type: ignore[attr-defined]
            assert len(value["a"]) <= 4
    assert num_ended > 0.9 * sum(r.sampling.grammar is not None for r in REQUESTS)


def scores(outcome: Outcome) -> list[tuple[float, list[int], list[float]]]:
    """The log-probability of each token, and the two likeliest tokens with theirs."""
    found = []
    for step in outcome.steps:
        if step.token_ids:
            rows = step.logprobs
            assert rows is not None
            for row in range(len(step.token_ids)):
                best = rows.top_ids[row].tolist(), rows.top_logprobs[row].tolist()
                found.append((float(rows.logprobs[row]), *best))
    return found


def test_log_probabilities_and_penalties_under_masks_are_those_without_speculation() -> None:
    """They are of the model's own distribution, whatever the masks, penalties and temperature leave of it."""
    changes = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.5, "logprobs": 2}
    asked = [
        replace(request, sampling=replace(request.sampling, **changes))  # type: ignore[arg-type]
        for request in REQUESTS[:15]
        if request.sampling.grammar is not None
    ]
    alone, *others = (run(asked, k=k) for k in (0, 3, 7))
    for found in others:
        assert tokens(found) == tokens(alone)
        assert [scores(outcome) for outcome in found] == [scores(outcome) for outcome in alone]
    is_likeliest = []
    for outcome in alone:
        prefix = list(outcome.request.prompt_token_ids)
        for token_id, (own, best_ids, best) in zip(outcome.token_ids, scores(outcome), strict=True):
            logits = SCRIPT.logits(np.array([prefix_hash(prefix)], np.uint64))[0].astype(np.float64)
            raw = logits - np.log(np.exp(logits).sum())
            assert own == pytest.approx(raw[token_id], abs=1e-5)
            assert best == pytest.approx(np.sort(raw)[::-1][:2].tolist(), abs=1e-5)
            is_likeliest.append(token_id == best_ids[0])
            prefix.append(token_id)
    assert sum(is_likeliest) < len(is_likeliest) / 2, "masks and penalties decide most draws"
    assert tokens(run([r for r in REQUESTS[:15] if r.sampling.grammar is not None], k=0)) != tokens(alone)


def test_what_is_forced_is_not_left_to_the_draft() -> None:
    """Verifies still accept what the grammar alone allows, without any draft."""
    outcomes = [o for o in run(REQUESTS, k=3, agreement=None) if o.request.sampling.grammar is not None]
    assert sum(accepted for outcome in outcomes for _, accepted in outcome.rounds) > 2 * len(outcomes)


def test_neighbours_are_launched_ahead_behind_their_draft() -> None:
    """The draft's step is queued before it is known what its verify accepted, also where a grammar waits for it."""
    sizes = {"block_size": 2, "max_model_len": MAX_LEN, "num_blocks": 1600}
    draft = ScriptedDraft(describe("draft", SCRIPT, **sizes), SCRIPT)
    target = ScriptedTarget(describe("target", SCRIPT, **sizes), SCRIPT)
    harness = EngineHarness(target, draft, SchedulerSettings(), EOS, compile_grammar)
    plain = replace(REQUESTS[2], num_speculative_tokens=3)
    quiet = replace(
        plain.sampling, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, logit_bias={},
        bad_words=(), min_tokens=0, allowed_token_ids=(), max_tokens=30, ignore_eos=True, stop_token_ids=(),
    )  # fmt: skip
    harness.add(replace(plain, sampling=quiet))
    harness.add(replace(plain, sampling=replace(quiet, grammar=REQUESTS[0].sampling.grammar, ignore_eos=False)))
    harness.run()
    assert draft.num_overlapped > 3


def by_proposed_tokens(patch: pytest.MonkeyPatch) -> None:
    """The matcher goes on behind what was proposed, not what was accepted."""
    advance = SequenceGrammar.advance
    append = EngineSequence.append

    def wrong(self: EngineSequence, token_ids: list[int]) -> int:
        proposed = [] if self.window is None else self.window.token_ids
        patch.setattr(SequenceGrammar, "advance", lambda grammar, ids: advance(grammar, proposed or ids))
        return append(self, token_ids)

    patch.setattr(EngineSequence, "append", wrong)


def without_roll_back(patch: pytest.MonkeyPatch) -> None:
    look_ahead = SequenceGrammar.look_ahead

    def wrong(self: SequenceGrammar, proposals: Sequence[int], most: int) -> Window:
        rollback, self.matcher.rollback = self.matcher.rollback, lambda count: None  # type: ignore[method-assign]
        window = look_ahead(self, proposals, most)
        self.matcher.rollback = rollback  # type: ignore[method-assign]
        return window

    patch.setattr(SequenceGrammar, "look_ahead", wrong)


def of_the_wrong_row(patch: pytest.MonkeyPatch) -> None:
    masks = EngineSequence.grammar_masks

    def wrong(self: EngineSequence, num_rows: int) -> list[Any]:
        found = masks(self, num_rows)
        return found[1:] + found[:1]

    patch.setattr(EngineSequence, "grammar_masks", wrong)


def from_the_step_before(patch: pytest.MonkeyPatch) -> None:
    masks, before = EngineSequence.grammar_masks, dict[int, list[Any]]()

    def wrong(self: EngineSequence, num_rows: int) -> list[Any]:
        found = masks(self, num_rows)
        stale = before.get(id(self), found)
        before[id(self)] = found
        return (stale + found)[:num_rows]

    patch.setattr(EngineSequence, "grammar_masks", wrong)


@pytest.mark.parametrize("plant", [by_proposed_tokens, without_roll_back, of_the_wrong_row, from_the_step_before])
def test_a_planted_fault_is_seen(plant: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert tokens(run(REQUESTS, k=3)) != expected
