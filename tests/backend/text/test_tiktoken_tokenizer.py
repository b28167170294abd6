"""The tiktoken tokenizer against an independent cut into pieces and an independent merge loop."""

import itertools

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_backend.errors import InvalidRequestError
from kimi_backend.text.tiktoken_tokenizer import MAX_RUN_CHARS, _may_have_long_run, slice_for_encoding
from support.tiny_tokenizers import (
    REGRESSION_CORPUS,
    tempting_ranks,
    tempting_tokenizer,
    texts,
)

RANKS = tempting_ranks()
NUM_RANKS = len(RANKS)


def _letters(classes: str) -> str:
    return rf"(?:(?!\p{{Script=Han}})[{classes}])"


_UPPER = _letters(r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}")
_LOWER = _letters(r"\p{Ll}\p{Lm}\p{Lo}\p{M}")
_SPACE = r"\p{White_Space}"
_CONTRACTION = "(?:'(?:[sSſ]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?"  # noqa: RUF001
INDEPENDENT_PIECE = regex.compile(
    r"\p{Script=Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}\p{N}?\p{N}?"
    rf"|\x20?(?:(?!{_SPACE})[^\p{{L}}\p{{N}}])+[\r\n]*"
    rf"|{_SPACE}*[\r\n]+"
    rf"|{_SPACE}+(?={_SPACE}|\Z)"
    rf"|{_SPACE}+",
    regex.V1,
)


def merge_naively(piece: bytes) -> list[int]:
    """Byte pair encoding by its definition: merge the leftmost neighbours of least rank until none merge."""
    parts = [piece[index : index + 1] for index in range(len(piece))]
    while True:
        pairs = [(RANKS[a + b], place) for place, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in RANKS]
        if not pairs:
            return [RANKS[part] for part in parts]
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def encode_independently(text: str) -> list[int]:
    pieces = [match.group() for match in INDEPENDENT_PIECE.finditer(text)]
    assert "".join(pieces) == text
    return [token_id for piece in pieces for token_id in merge_naively(piece.encode())]


@given(text=texts())
@settings(deadline=None, max_examples=400)
def test_encodes_like_an_independent_implementation(text: str) -> None:
    assert tempting_tokenizer().encode(text) == encode_independently(text)


@pytest.mark.parametrize("text", REGRESSION_CORPUS)
def test_regression_corpus(text: str) -> None:
    tokenizer = tempting_tokenizer()
    token_ids = tokenizer.encode(text)
    assert token_ids == encode_independently(text)
    assert tokenizer.decode(token_ids) == text
    assert max(token_ids) < NUM_RANKS


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("aA bB", ["a", "A", " b", "B"]),
        ("ABab", ["ABab"]),
        ("a中文b", ["a", "中文", "b"]),
        ("1212121", ["121", "212", "1"]),
        ("a's A'S ab't", ["a's", " A'S", " ab't"]),
        ("a'sb", ["a's", "b"]),
        (" .!\n\na", [" .!\n\n", "a"]),
        ("a  \n  b", ["a", "  \n", " ", " b"]),
        ("a   ", ["a", "   "]),
        ("a  1", ["a", " ", " ", "1"]),
        ("\r\na", ["\r\n", "a"]),
        (".a", [".a"]),
        ("é中", ["é", "中"]),
    ],
)
def test_cuts_where_the_pattern_says(text: str, pieces: list[str]) -> None:
    expected = [token_id for piece in pieces for token_id in merge_naively(piece.encode())]
    assert tempting_tokenizer().encode(text) == expected


@pytest.mark.parametrize("ending", ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "'rE"])
def test_contractions_stay_with_their_word(ending: str) -> None:
    # The ranks have a merge "b'" that can only happen inside one piece.
    token_ids = tempting_tokenizer().encode(f"b{ending} b")
    assert token_ids[0] == RANKS[b"b'"]
    assert token_ids == encode_independently(f"b{ending} b")


@given(text=texts(), allow_special=st.booleans())
@settings(deadline=None)
def test_decode_undoes_encode(text: str, allow_special: bool) -> None:
    tokenizer = tempting_tokenizer()
    token_ids = tokenizer.encode(text, allow_special)
    assert tokenizer.decode(token_ids) == text
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()


@given(text=texts())
@settings(deadline=None)
def test_plain_text_never_gives_a_control_token(text: str) -> None:
    assert all(token_id < NUM_RANKS for token_id in tempting_tokenizer().encode(text))


def test_control_tokens_on_request() -> None:
    tokenizer = tempting_tokenizer()
    token_ids = tokenizer.encode("a<|im_end|><think>[BOS", allow_special=True)
    assert token_ids[1:3] == [NUM_RANKS + 2, NUM_RANKS + 22]
    assert tokenizer.decode(token_ids, skip_special=True) == "a<think>[BOS"
    reserved = tokenizer.encode(f"<|reserved_token_{NUM_RANKS + 5}|>", allow_special=True)
    assert reserved == [NUM_RANKS + 5]
    assert tokenizer.is_special(NUM_RANKS + 5)
    assert not tokenizer.is_special(NUM_RANKS + 22)


def test_ids_without_a_token_decode_to_nothing() -> None:
    tokenizer = tempting_tokenizer()
    assert tokenizer.decode([97, tokenizer.vocab_size, 10**9]) == "a"
    with pytest.raises(ValueError, match="-1 is negative"):
        tokenizer.decode([-1])


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "中\ud83d"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"lone surrogate U\+D"):
        tempting_tokenizer().encode(text)


@pytest.mark.parametrize("unit", ["a", " ", "\n", "A", "中", "!", "1", "é", "\t ", "🙂", "ab12 中!\r\n"])
def test_very_long_input(unit: str) -> None:
    text = unit * (900_000 // len(unit))
    tokenizer = tempting_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def slice_by_counting(text: str, max_slice: int, max_run: int) -> list[str]:
    """The rule, one character at a time."""
    parts: list[str] = []
    run = 0
    for index, char in enumerate(text):
        starts_slice = index % max_slice == 0
        same_kind = not starts_slice and char.isspace() == text[index - 1].isspace()
        run = run + 1 if same_kind else 1
        if starts_slice or run > max_run:
            parts.append("")
            run = 1
        parts[-1] += char
    return parts


@pytest.mark.parametrize("char", ["a", " ", "\u4e00", "\u3000"])
def test_only_texts_with_a_long_run_are_looked_through_for_it(char: str) -> None:
    words, most = "word " * 20_000, MAX_RUN_CHARS
    assert not _may_have_long_run(words, most)
    for place in range(most, most + 20_000, 997):
        assert _may_have_long_run(words[:place] + char * (most + 1) + words, most)


@pytest.mark.parametrize("allow_special", [False, True])
def test_of_a_text_that_is_too_long_only_the_beginning_is_encoded(allow_special: bool) -> None:
    tokenizer, text = tempting_tokenizer(), "?!" * 2 * MAX_RUN_CHARS
    whole = tokenizer.encode(text, allow_special)
    for enough in (0, 1000, len(whole) - 1):
        beginning = tokenizer.encode(text, allow_special, enough)
        assert enough < len(beginning) <= enough + MAX_RUN_CHARS
        assert beginning == whole[: len(beginning)]
    assert tokenizer.encode(text, allow_special, len(whole)) == whole


@given(text=st.text(alphabet="ab \n", max_size=60), max_slice=st.integers(1, 20), max_run=st.integers(1, 6))
def test_slices_follow_the_rule(text: str, max_slice: int, max_run: int) -> None:
    parts = [part for part in slice_for_encoding(text, max_slice, max_run) if part]
    assert parts == slice_by_counting(text, max_slice, max_run)
