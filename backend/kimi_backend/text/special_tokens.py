"""Tokens that stand outside the merge table: role markers, end of turn, tool-call brackets, reserved ids."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that the checkpoint's files declare beside the merge table."""

    token_id: int
    content: str
    is_special: bool
    """Hidden from text by default. Tool-call and think tokens are added tokens that clients need to see."""


class ControlTokenSplitter:
    """Finds control tokens in text: leftmost first, the longest where several start at the same character."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        self._pattern = compile_alternatives(self._ids)

    def split(self, text: str) -> list[str | int]:
        """`text` in order, as plain pieces (never empty) and the ids of the control tokens between them."""
        if self._pattern is None:
            return [text] if text else []
        pieces: list[str | int] = []
        end_of_last = 0
        for match in self._pattern.finditer(text):
            if match.start() > end_of_last:
                pieces.append(text[end_of_last : match.start()])
            pieces.append(self._ids[match.group()])
            end_of_last = match.end()
        if end_of_last < len(text):
            pieces.append(text[end_of_last:])
        return pieces


def compile_alternatives(strings: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that matches any of the strings, longest first; None when there is none."""
    longest_first = sorted(set(strings), key=lambda string: (-len(string), string))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
