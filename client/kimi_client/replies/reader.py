"""A chat reply, as it comes, to thoughts, content and tool calls.

Kimi writes its calls as

    <|tool_calls_section_begin|>
        <|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{JSON}<|tool_call_end|>
        ...
    <|tool_calls_section_end|>

without the blanks, where each marker is a control token. What it writes is not always of that form; docs/tool_calls.md
lists what is made of the rest.
"""

from collections.abc import Iterable
from enum import Enum, auto

from kimi_client.replies.calls import OpenCall
from kimi_client.replies.declared_tools import DeclaredTools
from kimi_client.replies.events import CallBegin, Event
from kimi_client.replies.markers import Mark, Marker, MarkerScanner
from kimi_client.replies.text import CALLS, Channel, ReplyText


class _State(Enum):
    TEXT = auto()
    """Outside of calls."""
    SPELLED = auto()
    """The place behind a section's beginning that was spelled: text, unless a call follows."""
    GAP = auto()
    """The place in a section, outside of its calls."""
    HEADER = auto()
    """The place behind a call's beginning."""
    ARGUMENTS = auto()
    UNDECLARED = auto()
    """The arguments of a call that stays text, since nobody declared its name."""
    DONE = auto()
    """The place behind the only call that was wanted."""


class ReplyReader:
    """Reads one reply. The events do not depend on how the reply was cut, and cost time linear in it."""

    def __init__(
        self,
        tools: DeclaredTools | None,
        *,
        begins_thinking: bool,
        splits_thinking: bool = True,
        is_one_call_enough: bool = False,
    ) -> None:
        """
        Args:
            tools: None leaves calls in the text, as they were written.
            begins_thinking: the prompt ends inside a think block.
            splits_thinking: False leaves thoughts in the content, as they were written.
            is_one_call_enough: what stands behind the first call is dropped.
        """
        self._tools = tools
        self._splits_thinking = splits_thinking
        self._is_one_call_enough = is_one_call_enough
        self._scanner = MarkerScanner()
        self._events: list[Event] = []
        self._text = ReplyText(self._events, is_thinking=begins_thinking and splits_thinking)
        self._state = _State.TEXT
        self._held: list[str] = []
        self._call: OpenCall | None = None
        self._num_calls = 0
        self._is_in_section = False
        self._has_section_call = False
        self.channels = [self._text.channel]
        """The channels of the reply's tokens: at its beginning, behind its first control token, and so on."""

    def feed(self, text: str, control_offsets: Iterable[int] = (), *, is_last: bool = False) -> list[Event]:
        """The events that the text adds.

        Args:
            text: any piece of the reply, the next one.
            control_offsets: characters of the whole reply before each control token that shows; see `MarkerScanner`.
            is_last: the reply ends here.
        """
        for piece in self._scanner.feed(text, control_offsets, is_last=is_last):
            if isinstance(piece, str):
                self._take_text(piece)
            elif self._is_structure(piece):
                self._take_marker(piece.mark)
            elif piece.mark is Mark.SECTION_BEGIN and self._tools and self._state in (_State.TEXT, _State.SPELLED):
                self._release()
                self._held, self._state = [piece.letters], _State.SPELLED
            else:
                self._take_text(piece.letters)
            if isinstance(piece, Marker) and piece.is_control:
                self.channels.append(self._channel())
        if is_last:
            self._finish()
        events = self._events.copy()
        self._events.clear()
        return events

    def _channel(self) -> Channel:
        is_text = self._state in (_State.TEXT, _State.SPELLED, _State.UNDECLARED)
        return self._text.channel if is_text else CALLS

    def _is_structure(self, marker: Marker) -> bool:
        """Tell whether the marker is more than its letters."""
        if marker.mark in (Mark.THINK_BEGIN, Mark.THINK_END):
            in_call = self._state in (_State.ARGUMENTS, _State.UNDECLARED)
            return self._splits_thinking and marker.is_control and not in_call
        if marker.mark is Mark.SECTION_END and not marker.is_control:
            # Vocabularies lack the singular form. Where nothing but an end can stand, the letters are one.
            return self._state is _State.GAP or (self._call is not None and self._call.is_closed)
        return self._tools is not None and marker.is_control

    def _take_text(self, text: str) -> None:
        match self._state:
            case _State.SPELLED if not text.isspace():
                self._release()
                self._text.put(text)
            case _State.TEXT | _State.UNDECLARED:
                self._text.put(text)
            case _State.GAP | _State.HEADER | _State.SPELLED:
                self._held.append(text)
            case _State.ARGUMENTS:
                assert self._call is not None
                self._call.put(text)

    def _take_marker(self, mark: Mark) -> None:
        if self._state is _State.DONE:
            return
        match mark:
            case Mark.THINK_BEGIN | Mark.THINK_END:
                self._take_think(mark)
            case Mark.ARGUMENTS_BEGIN:
                if self._state is _State.HEADER:
                    self._begin_arguments("".join(self._held))
            case Mark.CALL_BEGIN:
                self._end_call()
                self._is_in_section |= self._state is _State.SPELLED
                self._enter(_State.HEADER)
            case Mark.CALL_END:
                self._end_call(is_by_its_own=True)
            case Mark.SECTION_BEGIN:
                self._end_call()
                self._release()
                self._is_in_section, self._has_section_call = True, False
                self._enter(_State.GAP)
            case Mark.SECTION_END:
                self._end_call()
                self._release()

    def _enter(self, state: _State) -> None:
        if self._state is not _State.DONE:
            self._state = state
            self._held = []

    def _take_think(self, mark: Mark) -> None:
        """A think block begins or ends, which ends a section too. A stray end is dropped."""
        if self._state is _State.HEADER or (mark is Mark.THINK_END and not self._text.is_thinking):
            return
        self._release()
        if mark is Mark.THINK_BEGIN:
            self._text.begin_thoughts()
        else:
            self._text.end_thoughts()

    def _release(self) -> None:
        """Leave a section, or what may have been one. Text in a section that had no call is text after all."""
        held = "".join(self._held)
        if self._state is _State.SPELLED or (self._state is _State.GAP and not self._has_section_call and held.strip()):
            self._text.put(held)
        self._is_in_section = False
        self._enter(_State.TEXT)

    def _begin_arguments(self, header: str) -> None:
        assert self._tools is not None
        name = self._tools.name_in(header)
        self._has_section_call = True
        if name is None and not self._tools.is_nameless(header):
            self._text.put(header)
            self._enter(_State.UNDECLARED)
            return
        self._call = OpenCall(header, name, self._events, self._begin_call)
        self._enter(_State.ARGUMENTS)

    def _begin_call(self, name: str) -> int:
        assert self._tools is not None
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._events.append(CallBegin(index, f"functions.{name}:{self._tools.first_number + index}", name))
        return index

    def _end_call(self, *, is_by_its_own: bool = False) -> None:
        """End the call that is open, if one is: by its own end, or by what can only stand behind one."""
        if self._state is _State.HEADER:
            # Without the marker between them, arguments begin at the first brace.
            header, brace, arguments = "".join(self._held).partition("{")
            if header.strip() and (brace or is_by_its_own):
                self._begin_arguments(header)
                self._take_text(brace + arguments)
        if self._call is not None:
            self._close_call(self._call)
        if self._state in (_State.HEADER, _State.ARGUMENTS, _State.UNDECLARED):
            self._enter(_State.GAP if self._is_in_section else _State.TEXT)

    def _close_call(self, call: OpenCall, *, is_cut: bool = False) -> None:
        """is_cut: by the reply's end; arguments that are not whole then are incomplete, and not shown if none was."""
        assert self._tools is not None
        self._call = None
        if call.is_begun:
            call.end(is_complete=call.is_closed or not is_cut)
        elif is_cut and not call.is_closed:
            return
        else:
            name = call.name or self._tools.name_for(call.header, call.kept)
            if name is None:
                self._text.put(call.header + call.kept)
                return
            call.give_whole(name)
        self._text.follow_call()
        if self._is_one_call_enough:
            self._enter(_State.DONE)

    def _finish(self) -> None:
        if self._call is not None:
            self._close_call(self._call, is_cut=True)
        if self._state in (_State.SPELLED, _State.GAP):
            self._release()
        self._text.finish(has_calls=self._num_calls > 0)
