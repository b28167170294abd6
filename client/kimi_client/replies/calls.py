"""One call of a reply, from the marker that begins its arguments to the one that ends them."""

import json
from collections.abc import Callable

from kimi_client.replies.events import ArgumentsDelta, CallEnd, Event
from kimi_client.replies.json_extent import JsonExtent


class OpenCall:
    """The arguments of a call that is being read.

    An object goes out as it comes, without what stands behind its end. Anything else waits for the call's end: a JSON
    string that holds an object is unwrapped, nothing at all becomes {}.
    """

    def __init__(self, header: str, name: str | None, events: list[Event], begin: Callable[[str], int]) -> None:
        """
        Args:
            header: what the model wrote as the call's id.
            name: the tool; None where it cannot be known before the arguments are.
            events: where events are put.
            begin: puts the beginning of a call of this name there, and returns its index.
        """
        self.header = header
        self.name = name
        self._events = events
        self._begin = begin
        self._index: int | None = None
        self._has_text = False
        self._extent: JsonExtent | None = None
        self._kept: list[str] = []

    @property
    def is_begun(self) -> bool:
        """Its beginning has been given out."""
        return self._index is not None

    @property
    def is_closed(self) -> bool:
        """The arguments are a whole JSON object, array or string."""
        return self._extent is not None and self._extent.is_closed

    @property
    def kept(self) -> str:
        """The arguments that were not given out."""
        return "".join(self._kept).strip()

    def put(self, text: str) -> None:
        if not self._has_text:
            text = text.lstrip()
            if not text:
                return
            self._has_text = True
            self._extent = JsonExtent() if text[0] in '{["' else None
            if text[0] == "{" and self.name is not None:
                self._index = self._begin(self.name)
        if self._extent is not None:
            text = text[: self._extent.feed(text)]
        if self._index is None:
            self._kept.append(text)
        elif text:
            self._events.append(ArgumentsDelta(self._index, text))

    def end(self, *, is_complete: bool) -> None:
        """End a call whose beginning has been given out."""
        assert self._index is not None
        self._events.append(CallEnd(self._index, is_complete))

    def give_whole(self, name: str) -> None:
        """Give out a call that was kept back, as a complete one."""
        self._index = self._begin(name)
        self._events.append(ArgumentsDelta(self._index, _unwrapped(self.kept) or "{}"))
        self.end(is_complete=True)


def _unwrapped(arguments: str) -> str:
    """The object that a JSON string holds; anything else as it is."""
    if not arguments.startswith('"'):
        return arguments
    try:
        inner = json.loads(arguments).strip()
    except ValueError:
        return arguments
    return inner if inner.startswith("{") or not inner else arguments
