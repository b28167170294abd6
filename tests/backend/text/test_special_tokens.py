"""Finding control tokens in text."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_backend.text.prompt_guard import PromptGuard
from kimi_backend.text.special_tokens import (
    SCANNED_AT_ONCE,
    ControlTokenSplitter,
    Finder,
    compile_alternatives,
    pieces_of,
)
from support.thread_turns import chances_beside
from support.tiny_tokenizers import tempting_tokenizer

tokens = st.lists(st.text(alphabet="ab<|.*", min_size=1, max_size=5), max_size=8, unique=True)


def split_naively(text: str, ids: dict[str, int]) -> list[str | int]:
    """Leftmost, then longest, one character at a time."""
    pieces: list[str | int] = []
    place = 0
    while place < len(text):
        found = [token for token in ids if text.startswith(token, place)]
        if found:
            longest = max(found, key=len)
            pieces.append(ids[longest])
            place += len(longest)
        else:
            if not pieces or isinstance(pieces[-1], int):
                pieces.append("")
            pieces[-1] = str(pieces[-1]) + text[place]
            place += 1
    return pieces


@given(text=st.text(alphabet="ab<|.*c", max_size=30), contents=tokens)
def test_leftmost_then_longest(text: str, contents: list[str]) -> None:
    ids = {content: index for index, content in enumerate(contents)}
    assert ControlTokenSplitter(ids).split(text) == split_naively(text, ids)


@given(text=st.text(alphabet="ab<|.*c", max_size=30), contents=tokens, step=st.integers(1, 9))
def test_the_step_in_which_a_text_is_looked_through_changes_nothing(text: str, contents: list[str], step: int) -> None:
    ids = {content: index for index, content in enumerate(contents)}
    found = [ids[match[0]] for match in Finder(contents, step).find_all(text)]
    assert found == [piece for piece in split_naively(text, ids) if isinstance(piece, int)]
    pattern = compile_alternatives(contents)
    first = None if pattern is None else pattern.search(text)
    match = Finder(contents, step).find(text)
    assert (match and match.span()) == (first and first.span())


def test_pieces_are_the_text() -> None:
    for size in (0, 1, SCANNED_AT_ONCE, 2 * SCANNED_AT_ONCE + 1):
        assert "".join(pieces_of("ab" * size)) == "ab" * size


TOKENS = tempting_tokenizer().control_tokens
FOREIGN = chr(0xF0000)
STAND_INS = PromptGuard(TOKENS).choose_stand_ins([FOREIGN])


@pytest.mark.parametrize(
    "work",
    [
        ControlTokenSplitter(TOKENS).split,
        PromptGuard(TOKENS).is_harmless,
        lambda text: PromptGuard(TOKENS).choose_stand_ins([text + FOREIGN]),
        lambda text: STAND_INS.restore(text + FOREIGN),
    ],
    ids=["split", "guard", "choose stand-ins", "restore"],
)
def test_other_threads_run_while_a_long_text_is_looked_through(work: Callable[[str], Any]) -> None:
    text = "word " * 10**6
    for_its_length = chances_beside(lambda: work(text)) - chances_beside(lambda: work("word "))
    assert for_its_length >= len(text) // SCANNED_AT_ONCE


def test_a_very_long_token_compiles() -> None:
    long = "<" + "x" * 20_000
    pattern = compile_alternatives([long, long + "y", "<"])
    assert pattern is not None
    assert pattern.fullmatch(long + "y")
    assert compile_alternatives([]) is None


def test_text_full_of_beginnings_is_not_slow() -> None:
    splitter = ControlTokenSplitter(tempting_tokenizer().control_tokens)

    def seconds(unit: str) -> float:
        text = unit * (100_000 // len(unit))
        started = time.thread_time()
        splitter.split(text)
        return time.thread_time() - started

    # Measured: 20 and 2 times as long as plain text. A flat list of alternatives: 1,000 and 180 times.
    plain = min(seconds("a") for _ in range(5))
    assert min(seconds("<") for _ in range(3)) < 150 * plain
    assert min(seconds("<|reserved_token_") for _ in range(3)) < 60 * plain
