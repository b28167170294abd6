"""A sequence's lookup counts what of its own text would be found."""

from collections.abc import Iterator

import numpy as np
import pytest

from kimi_backend.spec_decode.lookup import LookupMemory, LookupPools, MatchAcceptance, SequenceLookup
from kimi_backend.spec_decode.lookup_index import LookupIndex, Match
from kimi_backend.types.plan import Int32Array

PROMPT = np.arange(100, 150)
TEXT = np.concatenate([PROMPT, np.arange(10), PROMPT[10:30], np.arange(20, 30)]).astype(np.int32)


def a_lookup(text: Int32Array) -> SequenceLookup:
    lookup = SequenceLookup.of(text, 4, LookupMemory(1 << 20))
    assert lookup is not None
    return lookup


def found(size: int, pools: LookupPools) -> Iterator[int]:
    """`num_found` of each verify, so many tokens coming in each."""
    lookup = a_lookup(TEXT[: len(PROMPT)])
    for start in range(len(PROMPT), len(TEXT), size):
        lookup.find(TEXT[:start], pools)
        end = min(start + size, len(TEXT))
        lookup.extend(TEXT[start:end].tolist(), TEXT[:end])
        yield lookup.num_found


@pytest.mark.parametrize("size", [1, 3, 5, 8, 40])
def test_what_would_be_looked_up_is_the_same_however_many_tokens_come_at_once(size: int) -> None:
    """A match stands behind the copy's fourth token: the other 16 come of it, and the one that ends it."""
    assert sum(found(size, LookupPools())) == 17


def test_matches_that_are_not_worth_their_rows_would_not_be_looked_up() -> None:
    pools = LookupPools()
    for length in (4, 8, 16):
        pools.note(Match(length, 5), is_checked=False)
    assert sum(found(5, pools)) == 0
    pools.note(Match(9, 5), is_checked=True)
    assert 0 < sum(found(5, pools)) < 17


def test_an_index_that_was_given_up_finds_nothing() -> None:
    lookup, pools = a_lookup(TEXT[:65]), LookupPools()
    lookup.find(TEXT[:65], pools)
    lookup.extend(TEXT[65:70].tolist(), TEXT[:70])
    assert lookup.num_found
    lookup.take_index()
    lookup.extend(TEXT[70:75].tolist(), TEXT[:75])
    assert not lookup.num_found
    assert lookup.find(TEXT[:75], pools) is None
    assert not lookup.is_following and not lookup.is_crowded


def test_an_index_that_finds_no_memory_to_grow_is_given_up() -> None:
    memory = LookupMemory(LookupIndex.bytes_of(60))
    text = np.arange(300, dtype=np.int32)
    lookup = SequenceLookup.of(text[:60], 4, memory)
    assert lookup is not None and memory.num_bytes == lookup.held_bytes == memory.max_bytes
    for end in range(61, 130):
        lookup.extend([end - 1], text[:end])
    assert (memory.num_bytes, lookup.held_bytes, memory.num_refused) == (0, 0, 1)
    assert lookup.take_index() is None


@pytest.mark.parametrize(("num_copied", "repetition"), [(0, 0), (20, 0), (30, 1), (46, 1), (47, 2), (64, 2)])
def test_prompts_are_told_apart_by_how_much_their_last_64_tokens_repeat(num_copied: int, repetition: int) -> None:
    before = np.arange(1000, 1200)
    ending = np.concatenate([np.arange(64 - num_copied), before[20 : 20 + num_copied]])
    assert a_lookup(np.concatenate([before, ending]).astype(np.int32)).repetition == repetition


def test_a_prompt_of_one_token_repeats_nothing() -> None:
    assert a_lookup(np.array([3], np.int32)).repetition == 0


def test_indexes_may_take_all_of_their_memory() -> None:
    memory = LookupMemory(100)
    assert memory.take(60) and memory.take(40)
    assert not memory.take(1)
    assert (memory.num_bytes, memory.num_refused) == (100, 1)
    memory.give_back(60)
    assert memory.num_bytes == 40


def test_a_texts_matches_are_compared_with_those_of_their_lengths() -> None:
    """Long ones are right more often than short ones: a text that has both and is like all others is no better."""
    own = MatchAcceptance()
    for _ in range(30):
        own.factor(0.5)
        own.record(2, 1)
        own.factor(7 / 8)
        own.record(7, 7), own.record(1, 0)
    assert own.factor(7 / 8) == pytest.approx(1, abs=0.01)
    for _ in range(20):
        own.record(4, 0)
    assert 0.75 < own.factor(7 / 8) < 0.9


@pytest.mark.parametrize(("num_kept", "factor"), [(0, 16 / 18), (1, 17 / 18), (2, 1)])
def test_a_few_matches_say_little_of_a_text(num_kept: int, factor: float) -> None:
    own = MatchAcceptance()
    own.factor(1.0)
    for kept in (num_kept > 0, num_kept > 1):
        own.record(1, int(kept))
    assert own.factor(1.0) == pytest.approx(factor, rel=0.002)


def test_old_matches_fade() -> None:
    own = MatchAcceptance()
    own.factor(0.5)
    for _ in range(1000):
        own.record(1, 1)
    for _ in range(150):
        own.record(1, 0)
    assert own.factor(0.5) == pytest.approx(2 * (150 / 2.718 + 4) / (150 + 16), rel=0.1)
