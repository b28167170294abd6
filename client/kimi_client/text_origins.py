"""The characters of a reply that were guessed, and by whom."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

Run = list[int]
"""[origin, characters] of neighbours of one origin. 0: drawn by the target alone, 1: accepted from the draft, 2: from
what stood in the text before."""


class TextWithOrigins(Protocol):
    """A chunk or a completion that was asked for with `return_token_origins=True`."""

    @property
    def text(self) -> str: ...

    @property
    def token_origins(self) -> Sequence[int]: ...

    @property
    def token_offsets(self) -> Sequence[int]: ...


class TextOrigins:
    """Follows one reply: the server's text goes in, and the parts of it that are shown come out with their origins.

    What is shown is the server's text in its order, without the markers between. So a part is looked for from the end
    of the one before. Text that is not found, which no reader gives, counts as the target's.
    """

    def __init__(self) -> None:
        self._text = ""
        self._num_gone = 0
        """Characters of the reply before `_text`."""
        self._num_shown = 0
        """Characters of `_text` up to the end of the last part that was found."""
        self._added: list[str] = []
        self._offsets: list[int] = []
        self._origins: list[int] = []

    def add(self, source: TextWithOrigins) -> None:
        """Take what the server sent next, with `return_token_origins`."""
        self._added.append(source.text)
        self._offsets += source.token_offsets
        self._origins += source.token_origins

    def of(self, part: str) -> list[Run]:
        """The runs of the part that is shown next."""
        if self._added:
            self._num_gone += self._num_shown
            self._text, self._num_shown = self._text[self._num_shown :] + "".join(self._added), 0
            self._added.clear()
        at = self._text.find(part, self._num_shown)
        if at < 0:
            return [[0, len(part)]]
        self._num_shown = at + len(part)
        return self._runs(self._num_gone + at, self._num_gone + self._num_shown)

    def _runs(self, start: int, end: int) -> list[Run]:
        """Those of the characters from start to end of the whole text."""
        runs: list[Run] = []
        token = bisect_right(self._offsets, start) - 1
        while start < end:
            has_next = token + 1 < len(self._offsets)
            stop = min(end, self._offsets[token + 1]) if has_next else end
            _extend(runs, self._origins[token] if token >= 0 else 0, stop - start)
            start, token = stop, token + 1
        return runs


def _extend(runs: list[Run], origin: int, num_chars: int) -> None:
    if num_chars and runs and runs[-1][0] == origin:
        runs[-1][1] += num_chars
    elif num_chars:
        runs.append([origin, num_chars])
