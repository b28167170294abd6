"""Thoughts are cut from answers however the text arrives, and no text steers the terminal."""

import pytest

from kimi_backend.cli.chat import ThoughtSplitter
from kimi_backend.cli.talk import printable


def split(text: str, size: int, *, is_thinking: bool) -> tuple[str, str]:
    splitter = ThoughtSplitter(is_thinking)
    pieces = [piece for at in range(0, len(text), size) for piece in splitter.feed(text[at : at + size])]
    pieces += splitter.feed("", is_last=True)
    thoughts = "".join(piece for piece, is_thought in pieces if is_thought)
    return thoughts, "".join(piece for piece, is_thought in pieces if not is_thought)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "is_thinking", "expected"),
    [
        ("I think.</think>Yes.", True, ("I think.", "Yes.")),
        ("</think>Yes.", True, ("", "Yes.")),
        ("a < b, </thin", True, ("a < b, </thin", "")),
        ("Yes.", False, ("", "Yes.")),
        ("<think>hm</think>Yes <thinking>.", False, ("hm", "Yes <thinking>.")),
        ("1 <", False, ("", "1 <")),
    ],
)
def test_thoughts_and_answer(text: str, is_thinking: bool, expected: tuple[str, str], size: int) -> None:
    assert split(text, size, is_thinking=is_thinking) == expected


def test_what_steers_a_terminal_is_shown_and_not_obeyed() -> None:
    assert printable("a\x1b[2Jb\n\tc\r\x9b模") == "a\\x1b[2Jb\n\tc\\r\\x9b模"
