"""The matcher against a search of the whole text."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_backend.errors import InvalidRequestError
from kimi_backend.text.stop_strings import StopStringMatcher

small_text = st.text(alphabet="ab中", max_size=25)
small_stops = st.lists(st.text(alphabet="ab中", min_size=1, max_size=5), max_size=4)


def search_whole(text: str, stops: list[str]) -> tuple[str, int] | None:
    """(stop, end) of the match that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None


def longest_open_suffix(text: str, stops: list[str]) -> int:
    return max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)


@given(text=small_text, stops=small_stops, cuts=st.lists(st.integers(0, 25), max_size=8), include_stop=st.booleans())
@settings(max_examples=500)
def test_agrees_with_a_search_of_the_whole_text(
    text: str, stops: list[str], cuts: list[int], include_stop: bool
) -> None:
    matcher = StopStringMatcher(stops, include_stop)
    emitted = ""
    pushed = 0
    for start, end in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        delta, match = matcher.push(text[start:end])
        emitted += delta
        pushed = end
        expected = search_whole(text[:end], stops)
        if match is not None:
            break
        assert expected is None
        assert emitted == text[: end - longest_open_suffix(text[:end], stops)]
    expected = search_whole(text[:pushed], stops)
    if expected is None:
        assert emitted + matcher.flush() == text
        return
    stop, stop_end = expected
    cut_at = stop_end if include_stop else stop_end - len(stop)
    assert match is not None
    assert (match.stop, match.start, match.end) == (stop, stop_end - len(stop), stop_end)
    assert emitted == text[:cut_at]
    assert match.num_chars_after == pushed - stop_end
    assert matcher.push("more") == ("", match)
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "text", "expected_text", "expected_stop"),
    [
        (["END"], "abcENDxyz", "abc", "END"),
        (["bc", "abcd"], "xabcd", "xa", "bc"),
        (["cd", "abcd"], "xabcd", "x", "abcd"),
        (["aab"], "aaab", "a", "aab"),
        (["\n\n"], "one\n\ntwo", "one", "\n\n"),
        (["a", "a"], "ba", "b", "a"),
    ],
)
def test_which_match_wins(stops: list[str], text: str, expected_text: str, expected_stop: str) -> None:
    whole, match = StopStringMatcher(stops).push(text)
    assert match is not None
    assert (whole, match.stop) == (expected_text, expected_stop)
    matcher = StopStringMatcher(stops)
    one_by_one = "".join(matcher.push(char)[0] for char in text)
    assert one_by_one == expected_text


def test_holds_back_only_what_could_become_a_stop_string() -> None:
    matcher = StopStringMatcher(["abc"])
    assert matcher.push("xxab") == ("xx", None)
    assert matcher.push("a") == ("ab", None)
    assert matcher.flush() == "a"


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (["a" * 9000, "b" * 9000], r"stop has 18000 characters in all; at most 16384"),
        (["a", ""], r"stop\[1\] is empty"),
        ([3], r"stop\[0\] is 3; a string"),
        (["\ud800"], r"stop\[0\]: .*surrogate"),
    ],
)
def test_malformed_stop_strings_are_named(stops: list, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StopStringMatcher(stops)


def test_text_that_was_given_out_begins_no_match() -> None:
    matcher = StopStringMatcher(["ab"], False)
    assert matcher.push("xa") == ("x", None)
    assert matcher.flush() == "a"
    assert matcher.push("b") == ("b", None)
    assert matcher.push("ab")[0] == ""
