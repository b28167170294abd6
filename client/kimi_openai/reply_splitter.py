"""A chat reply's text as it comes -> reasoning, content and tool calls.

Kimi-K2 writes its calls as

    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{JSON}<|tool_call_end|>
    ...<|tool_calls_section_end|>

A call is given out when it is whole. What cannot be read as one, or was not finished, stays content: nothing is lost.
"""

import re
from dataclasses import dataclass
from enum import Enum, auto

THINK_BEGIN = "<think>"
THINK_END = "</think>"
SECTION_BEGIN = "<|tool_calls_section_begin|>"
SECTION_END = "<|tool_calls_section_end|>"
CALL_END = "<|tool_call_end|>"
_CALL = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?P<id>[^<]*?)\s*<\|tool_call_argument_begin\|>(?P<arguments>.*)", re.DOTALL
)
_NAME = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")


@dataclass(frozen=True, slots=True)
class ToolCall:
    call_id: str
    """As the model wrote it, such as functions.search:0; the template wants it back in `tool_call_id`."""
    name: str
    arguments: str
    """JSON, if the model wrote any."""


@dataclass(slots=True)
class ReplyPart:
    """What a piece of text adds."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


class _Mode(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALLS = auto()


class ReplySplitter:
    """Feed it the text, in pieces of any size; the parts do not depend on how it was cut."""

    def __init__(self, *, begins_with_reasoning: bool, reads_tool_calls: bool) -> None:
        self._mode = _Mode.REASONING if begins_with_reasoning else _Mode.CONTENT
        self._pending = ""
        into_calls = {SECTION_BEGIN: _Mode.CALLS} if reads_tool_calls else {}
        self._exits = {
            _Mode.REASONING: {THINK_BEGIN: _Mode.REASONING, THINK_END: _Mode.CONTENT, **into_calls},
            _Mode.CONTENT: into_calls,
            _Mode.CALLS: {CALL_END: _Mode.CALLS, SECTION_END: _Mode.CONTENT},
        }
        """In each mode: a marker that ends it -> the mode behind it."""

    def feed(self, text: str, *, is_last: bool = False) -> ReplyPart:
        """What the text adds; what may be the beginning of a marker waits, until the last text has come."""
        part = ReplyPart()
        self._pending += text
        while (found := self._first_marker()) is not None:
            at, marker = found
            before, self._pending = self._pending[:at], self._pending[at + len(marker) :]
            self._put(part, before, marker)
            self._mode = self._exits[self._mode][marker]
        sure = len(self._pending) if is_last else self._num_sure()
        self._put(part, self._pending[:sure], "")
        self._pending = self._pending[sure:]
        return part

    def _first_marker(self) -> tuple[int, str] | None:
        found = [(at, marker) for marker in self._exits[self._mode] if (at := self._pending.find(marker)) >= 0]
        return min(found, default=None)

    def _num_sure(self) -> int:
        """Characters that belong to this mode whatever comes: no call before its end, no beginning of a marker."""
        if self._mode is _Mode.CALLS:
            return 0
        markers = self._exits[self._mode]
        for start in range(max(0, len(self._pending) - max(map(len, markers), default=0)), len(self._pending)):
            if any(marker.startswith(self._pending[start:]) for marker in markers):
                return start
        return len(self._pending)

    def _put(self, part: ReplyPart, text: str, marker: str) -> None:
        if self._mode is _Mode.REASONING:
            part.reasoning += text
        elif self._mode is _Mode.CONTENT:
            part.content += text
        elif (call := read_call(text)) is not None and marker == CALL_END:
            part.tool_calls += (call,)
        elif text.strip():
            part.content += text + (marker if marker == CALL_END else "")


def read_call(text: str) -> ToolCall | None:
    """The call between the markers; None where it is not of the form above."""
    found = _CALL.fullmatch(text)
    name = _NAME.fullmatch(found["id"]) if found else None
    if found is None or name is None:
        return None
    return ToolCall(found["id"], name["name"], found["arguments"].strip())
