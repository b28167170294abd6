"""Kimi's control tokens in a reply's text, told from the same letters spelled by ordinary tokens."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto


class Mark(Enum):
    THINK_BEGIN = auto()
    THINK_END = auto()
    SECTION_BEGIN = auto()
    CALL_BEGIN = auto()
    ARGUMENTS_BEGIN = auto()
    CALL_END = auto()
    SECTION_END = auto()


MARKS = {
    "<think>": Mark.THINK_BEGIN,
    "</think>": Mark.THINK_END,
    "<|tool_calls_section_begin|>": Mark.SECTION_BEGIN,
    "<|tool_call_section_begin|>": Mark.SECTION_BEGIN,
    "<|tool_call_begin|>": Mark.CALL_BEGIN,
    "<|tool_call_argument_begin|>": Mark.ARGUMENTS_BEGIN,
    "<|tool_call_end|>": Mark.CALL_END,
    "<|tool_calls_section_end|>": Mark.SECTION_END,
    "<|tool_call_section_end|>": Mark.SECTION_END,
}
"""Letters -> meaning. Kimi's vocabulary has no token for the section markers in the singular; models spell them."""

_ANY = re.compile("|".join(map(re.escape, MARKS)))
_BEGINNINGS = frozenset(letters[:size] for letters in MARKS for size in range(1, len(letters)))
_LONGEST = max(map(len, MARKS))


@dataclass(frozen=True, slots=True)
class Marker:
    mark: Mark
    letters: str
    is_control: bool
    """The model drew the control token; False: it spelled the letters."""


class MarkerScanner:
    """Cuts a reply's text at its markers, in time linear in the text; the result does not depend on how it was fed."""

    def __init__(self) -> None:
        self._tail = ""
        self._num_done = 0
        self._control_offsets: set[int] = set()

    def feed(self, text: str, control_offsets: Iterable[int] = (), *, is_last: bool = False) -> Iterator[str | Marker]:
        """Text and markers in order; what may be the beginning of a marker waits for more.

        Args:
            control_offsets: characters of the whole reply before each control token. One may be told before its
                letters come, never after.
        """
        self._control_offsets.update(control_offsets)
        text = self._tail + text
        end = len(text) if is_last else _num_sure(text)
        at = 0
        for found in _ANY.finditer(text, 0, end):
            if found.start() > at:
                yield text[at : found.start()]
            is_control = self._num_done + found.start() in self._control_offsets
            yield Marker(MARKS[found[0]], found[0], is_control)
            at = found.end()
        if end > at:
            yield text[at:end]
        self._tail = text[end:]
        self._num_done += end


def _num_sure(text: str) -> int:
    """The number of characters that no marker which is still incomplete can begin in: each has one "<", its first."""
    start = text.rfind("<", max(0, len(text) - _LONGEST))
    return start if start >= 0 and text[start:] in _BEGINNINGS else len(text)
