"""Finding control tokens in text."""

import time

from hypothesis import given
from hypothesis import strategies as st

from kimi_backend.text.special_tokens import ControlTokenSplitter, compile_alternatives
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
        started = time.perf_counter()
        splitter.split(text)
        return time.perf_counter() - started

    # Measured: 20 and 2 times as long as plain text. A flat list of alternatives: 1,000 and 180 times.
    plain = min(seconds("a") for _ in range(5))
    assert min(seconds("<") for _ in range(3)) < 150 * plain
    assert min(seconds("<|reserved_token_") for _ in range(3)) < 60 * plain
