"""The text of a reply outside its calls: thoughts or content."""

from dataclasses import dataclass

from kimi_client.replies.events import ContentDelta, Event, ReasoningDelta


@dataclass(slots=True)
class Channel:
    """A part of a message that tokens belong to."""

    name: str | None
    """reasoning_content, content or tool_calls; None while it is undecided."""


REASONING, CONTENT, CALLS = Channel("reasoning_content"), Channel("content"), Channel("tool_calls")


class ReplyText:
    """Puts text into its channel.

    A call inside the thoughts ends them, unless they turn out to go on: what follows it waits for a `</think>`.
    Blank text at the content's beginning waits too: a reply that consists of calls has no content.
    """

    def __init__(self, events: list[Event], *, is_thinking: bool) -> None:
        """events: where deltas are put."""
        self.is_thinking = is_thinking
        self._events = events
        self._undecided: list[str] | None = None
        self._undecided_channel = CONTENT
        self._blank: list[str] | None = []

    @property
    def channel(self) -> Channel:
        """The channel of text that comes now."""
        if self._undecided is not None:
            return self._undecided_channel
        return REASONING if self.is_thinking else CONTENT

    def put(self, text: str) -> None:
        if self._undecided is not None:
            self._undecided.append(text)
        elif self.is_thinking:
            self._events.append(ReasoningDelta(text))
        else:
            self._put_content(text)

    def begin_thoughts(self) -> None:
        self._decide()
        self.is_thinking = True

    def end_thoughts(self) -> None:
        if self._undecided is not None:
            if text := "".join(self._undecided):
                self._events.append(ReasoningDelta(text))
            self._undecided, self._undecided_channel.name = None, REASONING.name
        self.is_thinking = False

    def follow_call(self) -> None:
        """Text that comes now stands behind a call."""
        if self.is_thinking and self._undecided is None:
            self._undecided, self._undecided_channel = [], Channel(None)

    def finish(self, *, has_calls: bool) -> None:
        self._decide()
        if self._blank and not has_calls:
            self._events.append(ContentDelta("".join(self._blank)))
        self._blank = None

    def _decide(self) -> None:
        """No `</think>` came behind the call that was made inside the thoughts."""
        if self._undecided is not None:
            text, self._undecided, self.is_thinking = "".join(self._undecided), None, False
            self._undecided_channel.name = CONTENT.name
            if text:
                self._put_content(text)

    def _put_content(self, text: str) -> None:
        if self._blank is not None:
            self._blank.append(text)
            if text.isspace():
                return
            text, self._blank = "".join(self._blank), None
        self._events.append(ContentDelta(text))
