"""Tokens that stand outside the merge table: role markers, end of turn, tool-call brackets, reserved ids."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

SCANNED_AT_ONCE = 2**16
"""Characters of one call of the pattern engine, in which no other thread of the process runs: 0.3 ms of work."""


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
        self._finder = Finder(self._ids)

    def split(self, text: str) -> list[str | int]:
        """`text` in order, as plain pieces (never empty) and the ids of the control tokens between them."""
        pieces: list[str | int] = []
        end_of_last = 0
        for match in self._finder.find_all(text):
            if match.start() > end_of_last:
                pieces.append(text[end_of_last : match.start()])
            pieces.append(self._ids[match.group()])
            end_of_last = match.end()
        if end_of_last < len(text):
            pieces.append(text[end_of_last:])
        return pieces


class Finder:
    """Finds any of some strings in text: leftmost first, the longest that fits. Others run while it looks through a
    long text."""

    def __init__(self, strings: Iterable[str], step: int = SCANNED_AT_ONCE) -> None:
        strings = list(strings)
        self._pattern = compile_alternatives(strings)
        self._longest = max(map(len, strings), default=0)
        self._step = step

    def find(self, text: str, start: int = 0) -> re.Match[str] | None:
        """The first one that begins at `start` or behind it."""
        while self._pattern is not None and start < len(text):
            match = self._pattern.search(text, start, start + self._step + self._longest)
            start += self._step
            if match is not None and match.start() < start:  # what begins later may be cut off
                return match
        return None

    def find_all(self, text: str) -> Iterator[re.Match[str]]:
        """All of them that do not overlap one before."""
        match = self.find(text)
        while match is not None:
            yield match
            match = self.find(text, match.end())


def pieces_of(text: str) -> Iterator[str]:
    """The text, for work of which a whole long text would hold up other threads."""
    return (text[start : start + SCANNED_AT_ONCE] for start in range(0, len(text), SCANNED_AT_ONCE))


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
