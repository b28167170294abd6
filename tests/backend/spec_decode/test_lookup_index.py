"""`spec_decode.lookup_index` against its definition in quadratic time."""

import random
import time

import numpy as np
import pytest

from kimi_backend.spec_decode.lookup_index import MOST_CANDIDATES, LookupIndex, Match, continuation
from support.lookup_checks import plain_continuation, plain_match

SEEDS = range(6)


def some_text(rng: random.Random, length: int) -> list[int]:
    """Fresh tokens, spans that are repeated, and runs."""
    text = [rng.randrange(4)]
    while len(text) < length:
        start, kind = rng.randrange(len(text)), rng.random()
        if kind < 0.4:
            text += [rng.randrange(rng.choice((3, 50, 160_000))) for _ in range(rng.randrange(1, 8))]
        elif kind < 0.9:
            text += text[start : start + rng.randrange(1, 60)]
        else:
            text += [text[start]] * rng.randrange(1, 12)
    return text[:length]


@pytest.mark.parametrize("min_match", [1, 2, 4, 9])
@pytest.mark.parametrize("seed", SEEDS)
def test_finds_what_the_definition_finds(seed: int, min_match: int) -> None:
    rng = random.Random(seed)
    text = some_text(rng, 260)
    tokens = np.array(text, np.int32)
    num_known = rng.randrange(1, 80)
    index = LookupIndex(tokens[:num_known], min_match)
    while num_known < len(text):
        if rng.random() < 0.7:  # a prompt's chunk or a failed row brings tokens that nobody asks a match for
            found, expected = index.find(tokens[:num_known]), plain_match(text[:num_known], min_match)
            if expected is None or plain_match(text[:num_known], min_match, MOST_CANDIDATES) == expected:
                assert found == expected
            elif found is not None:  # one that goes on may be longer than what a search would find now
                assert text[found.end - found.length : found.end] == text[num_known - found.length : num_known]
        end = min(num_known + rng.randrange(1, 9), len(text))
        index.extend(text[num_known:end], tokens[:end])
        place = rng.randrange(num_known, end)  # what stood behind it then says nothing
        expected = plain_match(text[:place], min_match)
        if expected is None or plain_match(text[:place], min_match, MOST_CANDIDATES) == expected:
            assert index.find_at(tokens[:end], place) == expected
        num_known = end


def test_a_grown_index_is_one_made_at_once() -> None:
    text = some_text(random.Random(1), 700)
    tokens = np.array(text, np.int32)
    grown = LookupIndex(tokens[:3], 4)
    for end in range(4, len(text) + 1):
        grown.extend([text[end - 1]], tokens[:end])
        if end % 50 == 0:
            assert grown.find(tokens[:end]) == LookupIndex(tokens[:end], 4).find(tokens[:end])


def test_an_index_that_nobody_grows_grows_at_twice_the_places_it_was_made_for() -> None:
    tokens = np.arange(300, dtype=np.int32)
    index = LookupIndex(tokens[:64], 4)
    num_bytes = []
    for end in range(65, 140):
        index.extend([end - 1], tokens[:end])
        num_bytes.append(index.num_bytes)
    assert num_bytes == [64 * 9] * 64 + [256 * 9] * 11


def test_a_search_looks_at_no_more_than_the_latest_places() -> None:
    """The longest match is the oldest of more places than are looked at."""
    rare, common = [900, 901, 902], [1, 2, 3]
    text = rare + common
    for filler in range(MOST_CANDIDATES + 5):
        text += [1000 + filler, *common]
    text += rare + common
    found = LookupIndex(np.array(text, np.int32), 3).find(np.array(text, np.int32))
    assert found == plain_match(text, 3, MOST_CANDIDATES)
    assert found != plain_match(text, 3)


def test_extending_tells_how_much_was_foretold() -> None:
    text = [5, 6, 7, 8, 9, 5, 6]
    tokens = np.array([*text, 7, 8, 1, 1], np.int32)
    index = LookupIndex(tokens[:7], 2)
    assert index.extend([7], tokens[:8]) == 0, "nobody asked for a match"
    assert index.find(tokens[:8]) == Match(3, 3)
    assert index.extend([8, 1, 1], tokens[:11]) == 1
    assert index.find(tokens[:11]) is None


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_a_continuation_ends_where_the_text_does_and_goes_on_with_itself(count: int) -> None:
    text = np.array([4, 1, 2, 1, 2, 1, 2], np.int32)
    expected = [1, 2, 1, 2, 1, 2, 1][:count]
    assert continuation(text, Match(4, 5), count) == plain_continuation(text.tolist(), Match(4, 5), count) == expected


def test_a_long_prompt_is_small_and_quick() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 160_000, 65_536).astype(np.int32)
    tokens[40_000:] = tokens[:25_536]
    start_s = time.process_time()
    index = LookupIndex(tokens, 4)
    assert index.find(tokens) == Match(25_536, 25_536)
    assert time.process_time() - start_s < 1  # 7 ms
    assert index.num_bytes <= LookupIndex.bytes_of(len(tokens)) <= 16 * len(tokens)


def test_no_text_makes_a_search_long() -> None:
    tokens = np.tile(np.array([7] * 40 + [8], np.int32), 800)
    indexes = [LookupIndex(tokens[: end - 20], 4) for end in range(20_000, 20_100)]
    start_s = time.process_time()
    for index, end in zip(indexes, range(20_000, 20_100), strict=True):
        index.find(tokens[: end - 20])
    assert time.process_time() - start_s < 1  # 5 ms
