"""Stop strings in text that arrives in pieces.

The match that is complete first wins: generation ends the moment any stop string is there. Of several that are complete
at the same character the longest wins, so what is cut off never begins with the rest of another. Neither depends on
how the text was cut into pieces.
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kimi_backend.errors import InvalidRequestError
from kimi_backend.text.unicode_text import require_valid_unicode

MAX_STOP_CHARS = 16_384
"""The characters of all stop strings of a request together: each costs a few hundred bytes while the request runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """The place at which a stop string was found, in characters from the first one pushed."""

    stop: str
    start: int
    end: int
    num_chars_after: int
    """Pushed characters after `end`."""


class StopStringMatcher:
    """Holds back only what could still become a stop string. One for each request."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """Args:
        stops: the stop strings; none at all lets everything pass.
        include_stop: emit the stop string as well.

        Raises:
            InvalidRequestError: a stop string is not a string, is empty, or holds a lone surrogate (names its index);
                or they are longer than MAX_STOP_CHARS together.
        """
        check_stop_strings(stops)
        self._automaton = _build_automaton(stops) if stops else None
        self._first_char = re.compile("|".join(sorted({re.escape(stop[0]) for stop in stops})))
        self._include_stop = include_stop
        self._node = 0
        self._held = ""
        self._num_pushed = 0
        self._match: StopMatch | None = None

    def push(self, text: str) -> tuple[str, StopMatch | None]:
        """The text that is now safe to emit, and the match if there is one. After a match nothing more is emitted."""
        if self._match is not None:
            return "", self._match
        if self._automaton is None or (self._node == 0 and not self._first_char.search(text)):
            self._num_pushed += len(text)
            return text, None
        node = self._node
        for index, char in enumerate(text):
            node = self._automaton.step(node, char)
            stop = self._automaton.match[node]
            if stop is not None:
                return self._finish_match(text, index + 1, stop)
        self._node = node
        self._num_pushed += len(text)
        candidate = self._held + text
        num_held = self._automaton.depth[node]
        self._held = candidate[len(candidate) - num_held :]
        return candidate[: len(candidate) - num_held], None

    def flush(self) -> str:
        """Return what is held back, for when no more text comes. Nothing after a match."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _finish_match(self, text: str, num_read: int, stop: str) -> tuple[str, StopMatch]:
        end = self._num_pushed + num_read
        start = end - len(stop)
        cut_at = end if self._include_stop else start
        candidate = self._held + text
        emit = candidate[: cut_at - (self._num_pushed - len(self._held))]
        self._num_pushed += len(text)
        self._held = ""
        self._match = StopMatch(stop=stop, start=start, end=end, num_chars_after=self._num_pushed - end)
        return emit, self._match


def check_stop_strings(stops: Sequence[str], field: str = "stop") -> None:
    """Pass silently when every stop string can match something.

    Raises:
        InvalidRequestError: names the field, the index and what is allowed.
    """
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise InvalidRequestError(f"{field}[{index}] is {stop!r}; a string is expected")
        if not stop:
            raise InvalidRequestError(f"{field}[{index}] is empty; a stop string has at least one character")
        require_valid_unicode(stop, f"{field}[{index}]")
    num_chars = sum(map(len, stops))
    if num_chars > MAX_STOP_CHARS:
        raise InvalidRequestError(f"{field} has {num_chars} characters in all; at most {MAX_STOP_CHARS} are allowed")


@dataclass(frozen=True, slots=True)
class _Automaton:
    """Aho and Corasick 1975. Node n stands for the longest suffix of the text that begins some stop string."""

    children: list[dict[str, int]]
    fallback: list[int]
    depth: list[int]
    match: list[str | None]
    """The longest stop string that ends where the node does."""

    def step(self, node: int, char: str) -> int:
        """Amortised O(1): each fallback undoes an earlier step down."""
        while char not in self.children[node]:
            if node == 0:
                return 0
            node = self.fallback[node]
        return self.children[node][char]


def _build_automaton(stops: Sequence[str]) -> _Automaton:
    automaton = _Automaton([{}], [0], [0], [None])
    for stop in stops:
        node = 0
        for char in stop:
            if char not in automaton.children[node]:
                automaton.children[node][char] = len(automaton.children)
                automaton.children.append({})
                automaton.fallback.append(0)
                automaton.depth.append(automaton.depth[node] + 1)
                automaton.match.append(None)
            node = automaton.children[node][char]
        automaton.match[node] = stop
    _link_fallbacks(automaton)
    return automaton


def _link_fallbacks(automaton: _Automaton) -> None:
    queue = deque(automaton.children[0].values())
    while queue:
        node = queue.popleft()
        for char, child in automaton.children[node].items():
            automaton.fallback[child] = automaton.step(automaton.fallback[node], char)
            queue.append(child)
        if automaton.match[node] is None:
            automaton.match[node] = automaton.match[automaton.fallback[node]]
