"""JSON of a stranger, parsed one value at a time and no further than a bound.

`json.loads` is one call in C that lets no other thread of the process run: 8 MB of `[]` take it 0.6 s, in which nothing
streams. The standard library's scanner in Python lets others run between two values; a long string is still one call.
"""

import json
from json import decoder, scanner
from typing import Any

from kimi_backend.errors import InvalidRequestError

MOST_VALUES = 2**17
"""Strings, numbers, lists, objects … of one text, all levels together: some 0.2 s of work."""


class _Decoder(json.JSONDecoder):
    """Counts the values below the outermost one."""

    def __init__(self, name: str, most_values: int) -> None:
        super().__init__()
        self._name, self._most, self._count = name, most_values, 0
        self.parse_array = self._array
        self.parse_object = self._object
        self.scan_once = self._scan = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _array(self, text_and_end: tuple[str, int], _: Any) -> Any:
        return decoder.JSONArray(text_and_end, self._next)  # type: ignore[attr-defined]

    def _object(self, text_and_end: tuple[str, int], strict: bool, _: Any, *hooks_and_memo: Any) -> Any:
        return decoder.JSONObject(text_and_end, strict, self._next, *hooks_and_memo)  # type: ignore[attr-defined]

    def _next(self, text: str, at: int) -> Any:
        self._count += 1
        if self._count > self._most:
            raise InvalidRequestError(f"{self._name}: more than {self._most} JSON values given")
        return self._scan(text, at)


def parse_json(name: str, text: str, most_values: int = MOST_VALUES) -> Any:
    """The same value as `json.loads` gives.

    Args:
        name: the field, for the message.
        most_values: below the outermost one.

    Raises:
        InvalidRequestError: not JSON, or more values than may be.
    """
    try:
        return _Decoder(name, most_values).decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name}: not valid JSON: {error}") from None
