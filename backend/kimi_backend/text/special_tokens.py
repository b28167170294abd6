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
    """A pattern that matches any of the strings, the longest that fits; None when there is none.

    Common beginnings are tried once, not once a string: a plain list of alternatives would let a client who sends a
    megabyte of "<" keep the server busy for 20 seconds.
    """
    root: _Trie = {}
    for string in strings:
        node = root
        for char in string:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_pattern_of(root)) if root else None


_Trie = dict[str, "_Trie"]
"""Next character → the rest; the key "" marks the end of a string."""


def _pattern_of(node: _Trie) -> str:
    literal = ""
    while len(node) == 1 and "" not in node:
        ((char, node),) = node.items()
        literal += re.escape(char)
    branches = [re.escape(char) + _pattern_of(rest) for char, rest in node.items() if char]
    if not branches:
        return literal
    return f"{literal}(?:{'|'.join(branches)})" + ("?" if "" in node else "")
