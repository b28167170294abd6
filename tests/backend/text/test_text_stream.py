"""Tokens to a client's text: what counts, what is cut."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_backend.errors import InvalidRequestError
from kimi_backend.text.detokenizer import make_detokenizer
from kimi_backend.text.text_stream import TextStream, TextUpdate
from support.tiny_tokenizers import tempting_tokenizer

TOKENIZER = tempting_tokenizer()


def run(stream: TextStream, token_ids: list[int], sizes: list[int]) -> tuple[str, int, str | None]:
    """(text, tokens that count, matched stop) of pushes of these sizes, then finish."""
    text, counted, matched = "", 0, None
    start = 0
    for size in [*sizes, len(token_ids)]:
        update = stream.push(token_ids[start : start + size])
        start += size
        text += update.text
        counted += update.num_tokens
        matched = update.matched_stop or matched
    update = stream.finish()
    return text + update.text, counted, update.matched_stop or matched


@given(
    token_ids=st.lists(st.sampled_from([97, 98, 0xE4, 0xB8, 0xAD, 256, 257, 400, 500]), max_size=20),
    stops=st.lists(st.sampled_from(["a", "ab", "ba", "中", "aab", "\ufffd", "b中"]), max_size=3),
    sizes=st.lists(st.integers(0, 6), max_size=6),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 5),
)
@settings(max_examples=300)
def test_the_cut_into_pushes_changes_nothing(
    token_ids: list[int], stops: list[str], sizes: list[int], include_stop: bool, min_tokens: int
) -> None:
    def stream() -> TextStream:
        return TextStream(TOKENIZER, stops, include_stop=include_stop, min_tokens=min_tokens)

    result = run(stream(), token_ids, sizes)
    assert result == run(stream(), token_ids, [1] * len(token_ids))
    text, counted, matched = result
    decoded = TOKENIZER.decode(token_ids, skip_special=True)
    if matched is None:
        assert (text, counted) == (decoded, len(token_ids))
    else:
        assert decoded.startswith(text) or decoded.startswith(text.rstrip("\ufffd"))
        assert matched in stops
        assert text.endswith(matched) == include_stop or not include_stop


def test_tokens_after_the_stop_string_do_not_count() -> None:
    stream = TextStream(TOKENIZER, ["ND"])
    assert stream.push(list(b"xE")) == TextUpdate(text="xE", num_tokens=2)
    assert stream.push(list(b"NDyz")) == TextUpdate(text="", num_tokens=2, matched_stop="ND")
    assert stream.push(list(b"more")) == TextUpdate(text="", num_tokens=0)
    assert stream.finish() == TextUpdate(text="", num_tokens=0)


def test_a_token_that_goes_past_the_stop_string_counts() -> None:
    pair = TOKENIZER.encode("ab")
    assert len(pair) == 1
    assert TextStream(TOKENIZER, ["a"]).push([*pair, 97]) == TextUpdate(text="", num_tokens=1, matched_stop="a")


def test_include_stop_keeps_it_and_nothing_after() -> None:
    update = TextStream(TOKENIZER, ["a"], include_stop=True).push(TOKENIZER.encode("ab"))
    assert update == TextUpdate(text="a", num_tokens=1, matched_stop="a")


def test_the_first_min_tokens_are_not_searched() -> None:
    stream = TextStream(TOKENIZER, ["a"], min_tokens=3)
    assert stream.push(list(b"aa")) == TextUpdate(text="aa", num_tokens=2)
    assert stream.push(list(b"aba")) == TextUpdate(text="ab", num_tokens=3, matched_stop="a")


def test_what_was_held_back_comes_at_the_end() -> None:
    stream = TextStream(TOKENIZER, ["abc"])
    assert stream.push(list(b"xab\xe4")) == TextUpdate(text="x", num_tokens=4)
    assert stream.finish() == TextUpdate(text="ab\ufffd", num_tokens=0)


def test_stop_strings_in_skipped_tokens_do_not_match() -> None:
    token_ids = [TOKENIZER.control_tokens["<|im_end|>"], 97]
    assert TextStream(TOKENIZER, ["end"]).push(token_ids).text == "a"
    shown = TextStream(TOKENIZER, ["end"], skip_special=False).push(token_ids)
    assert (shown.text, shown.matched_stop, shown.num_tokens) == ("<|im_", "end", 1)


SPELLED = TOKENIZER.encode("a</think>b")
THINK_END, END = (TOKENIZER.control_tokens[name] for name in ("</think>", "<|im_end|>"))
EACH_SIZE = st.lists(st.integers(1, 4), min_size=1)


@given(
    pieces=st.lists(st.sampled_from([[97], [0xE4], [0xE4, 0xB8, 0xAD], SPELLED, [THINK_END], [END]]), max_size=12),
    sizes=EACH_SIZE,
    skip_special=st.booleans(),
    stops=st.sampled_from([[], ["zz"], ["nk>a"], ["</think>a"]]),
)
def test_each_control_token_that_shows_is_told_by_its_offset(
    pieces: list[list[int]], sizes: list[int], skip_special: bool, stops: list[str]
) -> None:
    token_ids = [token_id for piece in pieces for token_id in piece]
    stream = TextStream(TOKENIZER, stops, skip_special=skip_special)
    text, offsets, at = "", [], 0
    for size in itertools.cycle(sizes):
        update = stream.push(token_ids[at : at + size])
        text, at = text + update.text, at + size
        offsets += update.control_offsets
        if at >= len(token_ids) or update.matched_stop:
            break
    text += stream.finish().text
    expected = [
        len(TOKENIZER.decode([*token_ids[:index], THINK_END], skip_special)) - len("</think>")
        for index, token_id in enumerate(token_ids[:at])
        if token_id in ((THINK_END,) if skip_special else (THINK_END, END))
    ]
    assert offsets == expected
    whole = [offset for offset in offsets if offset + len("</think>") <= len(text)]
    assert all(text.startswith(("</think>", "<|im_end|>"), offset) for offset in whole)


@given(
    pieces=st.lists(st.sampled_from([[97], [0xE4], [0xE4, 0xB8, 0xAD], SPELLED, [THINK_END], [END]]), max_size=12),
    sizes=EACH_SIZE,
    stops=st.sampled_from([[], ["zz"], ["nk>a"], ["a"]]),
)
def test_each_tokens_text_begins_at_its_offset(pieces: list[list[int]], sizes: list[int], stops: list[str]) -> None:
    """A token begins where the whole text of those before it ends, for any cut of the tokens into pushes."""
    token_ids = [token_id for piece in pieces for token_id in piece]
    stream, plain = TextStream(TOKENIZER, stops, with_offsets=True), TextStream(TOKENIZER, stops)
    offsets, num_counted, at = [], 0, 0
    for size in itertools.cycle(sizes):
        update, same = (each.push(token_ids[at : at + size]) for each in (stream, plain))
        assert dataclasses.replace(update, token_offsets=()) == same
        offsets, num_counted, at = [*offsets, *update.token_offsets], num_counted + update.num_tokens, at + size
        if at >= len(token_ids) or update.matched_stop:
            break
    one_by_one = make_detokenizer(TOKENIZER).push_each(token_ids[:num_counted])
    assert offsets == [sum(map(len, one_by_one[:index])) for index in range(num_counted)]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"stop\[0\] is empty"):
        TextStream(TOKENIZER, [""])
