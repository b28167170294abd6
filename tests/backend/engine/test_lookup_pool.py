"""Texts of ended requests, for others of their cache salt: found, bounded, never across salts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.spec_decode.lookup_index import LookupIndex, Match
from kimi_backend.spec_decode.lookup_pool import LookupPool, PooledMatch
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenOrigin
from support.engine_runs import EngineHarness, Outcome
from support.plain_decoding import decode_plainly
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

SCRIPT = LogitScript(400)
"""No text of so many tokens repeats itself by chance."""
REQUEST = GenerateRequest(
    request_id="r",
    prompt_token_ids=(9, 8, 7, 6),
    sampling=SamplingParams(seed=5, max_tokens=40),
    num_speculative_tokens=5,
    cache_salt="a",
)


def harness(with_draft: bool = False, pool_bytes: int = 1 << 20) -> EngineHarness:
    draft = ScriptedDraft(describe("draft", SCRIPT), SCRIPT, 0.3) if with_draft else None
    proposer = Proposer.LOOKUP_EAGLE3 if with_draft else Proposer.LOOKUP
    settings = SchedulerSettings(proposer=proposer, lookup_min_match=3, lookup_pool_bytes=pool_bytes)
    return EngineHarness(ScriptedTarget(describe("target", SCRIPT), SCRIPT), draft, settings)


def run(harness: EngineHarness, **changes: Any) -> Outcome:
    """One request, with the tokens of plain decoding."""
    outcome = harness.add(replace(REQUEST, **changes))
    harness.run()
    (expected,) = decode_plainly(SCRIPT, [outcome.request], eos_token_ids=frozenset(), max_model_len=128)
    assert outcome.token_ids == expected
    return outcome


def num_accepted(outcome: Outcome) -> int:
    return sum(step.num_accepted for step in outcome.steps if step.draft_origin is TokenOrigin.LOOKUP)


@pytest.mark.parametrize("with_draft", [False, True])
def test_the_second_request_finds_what_the_first_said(with_draft: bool) -> None:
    both = harness(with_draft)
    assert num_accepted(run(both)) == 0
    again = run(both)
    assert num_accepted(again) > 20
    assert len(again.steps) < 20
    assert both.lookup_memory.num_bytes == 0, "what is kept is the pool's"


@pytest.mark.parametrize("salt", ["b", None])
def test_never_across_salts(salt: str | None) -> None:
    both = harness()
    run(both)
    assert num_accepted(run(both, cache_salt=salt)) == 0
    assert num_accepted(run(both)) > 20


def test_it_is_off_by_default() -> None:
    assert SchedulerSettings().lookup_pool_bytes == 0
    both = harness(pool_bytes=0)
    run(both)
    assert num_accepted(run(both)) == 0


def test_a_text_that_goes_another_way_is_left() -> None:
    """The same beginning with another seed: the match of the prompt foretells nothing."""
    both = harness()
    run(both)
    other = run(both, sampling=replace(REQUEST.sampling, seed=6))
    assert num_accepted(other) < 4


def text_of(seed: int, length: int = 100) -> tuple[np.ndarray, LookupIndex]:
    text = np.random.default_rng(seed).integers(0, 100_000, length).astype(np.int32)
    return text, LookupIndex(text, 4)


def test_it_keeps_the_latest_texts_within_its_bytes() -> None:
    pool = LookupPool(30_000)
    for number in range(200):
        text, index = text_of(number)
        pool.keep(f"salt {number % 7}", text, index)
        assert pool.num_bytes <= 30_000
    alone = LookupPool(1 << 20)
    for number in range(11):
        alone.keep("a", *text_of(number))
    for number, is_kept in ((0, False), (2, False), (3, True), (10, True)):
        text, _ = text_of(number)
        found = alone.find("a", LookupIndex(text[:50], 4), text[:50], 1)
        assert (found is not None) is is_kept
        assert found is None or (found.match == Match(50, 50) and found.continuation(3) == text[50:53].tolist())
    small = LookupPool(100)
    small.keep("a", *text_of(0))
    assert small.num_bytes == 0


@pytest.mark.parametrize(("num_spare", "num_kept"), [(-1, 1), (0, 2)])
def test_texts_may_take_all_bytes(num_spare: int, num_kept: int) -> None:
    (first, index), (second, other) = text_of(0), text_of(1)
    each = first.nbytes + index.num_bytes
    for most, expected in ((2 * each, num_kept), (each, num_kept - 1)):
        pool = LookupPool(most + num_spare)
        pool.keep("a", first, index)
        pool.keep("b", second, other)
        assert pool.num_bytes == expected * each
        pool.keep("c", first, index)
        assert pool.num_bytes == expected * each


def test_of_texts_that_match_alike_the_latest_is_followed() -> None:
    pool, (text, _) = LookupPool(1 << 20), text_of(0)
    for number in (1, 2, 3):
        said = np.concatenate([text[:50], np.full(3, number, np.int32)])
        pool.keep("a", said, LookupIndex(said, 4))
    found = pool.find("a", LookupIndex(text[:50], 4), text[:50], 50)
    assert found is not None and found.continuation(3) == [3, 3, 3]
    assert pool.find("a", LookupIndex(text[:50], 4), text[:50], 51) is None


def test_a_match_is_followed_to_the_end_of_its_text() -> None:
    source = np.arange(10, dtype=np.int32)
    count, found = PooledMatch(source, Match(4, 6)).foretells([6, 7])
    assert (count, found) == (2, PooledMatch(source, Match(6, 8)))
    assert found is not None and found.continuation(7) == [8, 9]
    assert found.foretells([8, 9]) == (2, None)
    assert found.foretells([8, 9, 1]) == (2, None)
    assert found.foretells([8, 1, 1]) == (1, None)
