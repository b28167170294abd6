"""Finds where a JSON value ends while its text is still coming."""

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE_STRING = re.compile(r'["\\]')


class JsonExtent:
    """The extent of one object, array or string, whose first character is the first that is fed.

    It follows quotes and brackets only: text that is no JSON has an extent too, or never ends.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int:
        """The number of characters of `text` that belong to the value: all, or up to its last. Linear in the text."""
        if self.is_closed or not text:
            return 0
        at, self._is_escaped = int(self._is_escaped), False
        while at < len(text):
            found = (_INSIDE_STRING if self._is_in_string else _OUTSIDE).search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            if found[0] == "\\":
                self._is_escaped = at == len(text)
                at += 1
            elif self._closes(found[0]):
                return at
        return len(text)

    def _closes(self, char: str) -> bool:
        if char == '"':
            self._is_in_string = not self._is_in_string
        else:
            self._depth += 1 if char in "{[" else -1
        self.is_closed = not self._is_in_string and self._depth <= 0
        return self.is_closed
